"""The rows that a run resumed with another batch size reads: each exactly once in an epoch, for every kind of data."""

import sys
import types
from collections import Counter

import jax
import numpy as np
import pytest

import jpipe
from examples.papers.data.buckets import TrainingBatches
from examples.papers.data.words import Streams
from jpipe_train.checkpoint.resume import Facts, Resumed
from jpipe_train.config.config import Config
from jpipe_train.data import data
from jpipe_train.data.position import Position, start
from jpipe_train.data.rows import BatchesOfRows
from jpipe_train.data.target_data import UserBatches
from tests.train.checkpoint.written import FACTS
from tests.train.conftest import changed

SPEC = (jax.ShapeDtypeStruct((), np.dtype(np.int64)), jax.ShapeDtypeStruct((), np.dtype(np.int64)))
SIZES = [(8, 4), (8, 16), (8, 3), (3, 8), (6, 6)]


class Numbered:
    """Rows without end; row i is its number, and the number of its bucket."""

    spec = SPEC

    def __init__(self, bucket: int = 0):
        self.bucket = bucket

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple:
        assert index >= 0
        return np.asarray(index), np.asarray(self.bucket)


def resized(batches, size: int, step: int):
    """Return the same data as read by a run that resumes at this step with batches of another size."""
    if isinstance(batches, TrainingBatches):
        other = TrainingBatches(tuple(BatchesOfRows(Numbered(k), size, SPEC) for k in range(len(batches.rows))), batches.rows, batches.seed)
    elif isinstance(batches, UserBatches):
        other = target_batches(size)
    else:
        other = BatchesOfRows(batches.elements, size, SPEC)
    return other.continued(batches.position(step))


def target_batches(size: int, count: int = 200) -> UserBatches:
    rows = np.arange(count * size).reshape(count, size)
    return UserBatches([(each, each) for each in rows], "train", size)


def read(batches, first: int, end: int) -> list[tuple[int, int]]:
    """Return the rows of these batches, each as its number and its bucket."""
    rows = []
    for t in range(first, end):
        inputs, labels = (np.asarray(part[: len(part)]) for part in batches[t])
        rows += zip(inputs.tolist(), labels.tolist(), strict=True)
    return rows


@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize("kind", ["rows", "own"])
def test_no_row_is_read_twice_or_left_out(kind, before, after):
    first = BatchesOfRows(Numbered(), before, SPEC) if kind == "rows" else target_batches(before)
    then = resized(first, after, 10)
    last = resized(then, before, 17)  # and once more, back to the size before
    rows = [number for number, _ in read(first, 0, 10) + read(then, 10, 17) + read(last, 17, 20)]
    assert rows == list(range(10 * before + 7 * after + 3 * before))


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_no_row_of_a_bucket_is_read_twice_or_left_out(before, after):
    rows = (37, 0, 101)
    first = TrainingBatches(tuple(BatchesOfRows(Numbered(k), before, SPEC) for k in range(3)), rows, 5)
    for step in (0, 7, 30):
        then = resized(first, after, step)
        reads = Counter(read(first, 0, step) + read(then, step, step + 60))
        assert set(reads.values()) == {1}
        for bucket in range(3):
            numbers = sorted(number for number, of in reads if of == bucket)
            assert numbers == list(range(len(numbers)))
        again = TrainingBatches(then.buckets, rows, 5).continued(then.first_position)  # the next resume, with the same size
        assert read(again, step + 5, step + 60) == read(then, step + 5, step + 60)
        # Each epoch has its rows in its time, but for those that fill no batch.
        total = step * before + 60 * after
        assert all(abs(count - total * rows[of] / sum(rows)) <= rows[of] + 3 * max(before, after) for of, count in counts(reads).items())


def counts(reads) -> Counter:
    return Counter(bucket for _, bucket in reads)


def test_an_order_that_begins_at_the_first_row_equals_that_of_a_new_run():
    rows = (37, 101)
    new = TrainingBatches(tuple(BatchesOfRows(Numbered(k), 4, SPEC) for k in range(2)), rows, 5)
    assert read(new.continued(start(4, 2)), 0, 50) == read(new, 0, 50)
    assert new.position(50) == Position(batch=50, rows=tuple(counts(read(new, 0, 50))[k] for k in range(2)), pieces=4)


def test_a_position_from_other_buckets_counts_all_rows():
    plain = BatchesOfRows(Numbered(), 4, SPEC)
    bucketed = TrainingBatches(tuple(BatchesOfRows(Numbered(k), 8, SPEC) for k in range(2)), (37, 101), 5)
    continued = bucketed.continued(plain.position(20))
    assert continued.first_position.batch == 20
    assert continued.first_position.total == 80
    assert plain.continued(bucketed.position(10)).first_position.total == 80


@pytest.mark.parametrize("after", [2, 5])
def test_a_running_text_keeps_its_windows(after):
    words = np.arange(4 * 25, dtype=np.int32)
    spec = ({"tokens": jax.ShapeDtypeStruct((3,), words.dtype), "continues": SPEC[0]}, jax.ShapeDtypeStruct((3,), words.dtype))
    first = BatchesOfRows(Streams(words, 4, 3, True), 4, spec)
    then = BatchesOfRows(Streams(words, after, 3, True), after, spec).continued(first.position(3))
    seen = [batches[t][0]["tokens"][:] for batches, steps in ((first, range(3)), (then, range(3, 3 + 20 // after))) for t in steps]
    assert sorted(np.concatenate(seen).reshape(-1).tolist()) == sorted(
        number for piece in range(4) for number in range(25 * piece, 25 * piece + 24)
    )


def test_the_first_row_of_a_resumed_run(tmp_path):
    first, following = Position(batch=4, rows=(40,), pieces=8), Position(batch=10, rows=(88,), pieces=8)
    facts = Facts(**FACTS | {"data": {"batch_size": 8, "order": first, "position": following}})
    resumed = Resumed(tmp_path, 10, facts, ())
    assert resumed.position(8) == first
    assert resumed.position(4) == following


class Short:
    """Batches of one row that end after a few, or begin again."""

    def __init__(self, size: int, count: int, *, again: bool):
        self.size, self.count, self.again = size, count, again

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple:
        if index >= self.count and not self.again:
            raise IndexError(f"no batch {index}")
        return np.zeros((self.size, 2), np.float32), np.zeros(self.size, np.int32)


@pytest.fixture
def of_length(tiny, monkeypatch):
    """Return a function that returns a config with `count` batches of training data."""
    module = types.ModuleType("short_data")

    def make(count: int, *, again: bool = False) -> Config:
        module.batches = lambda seed, batch_size: (Short(batch_size, count, again=again), Short(batch_size, 1, again=False))
        monkeypatch.setitem(sys.modules, "short_data", module)
        fields = {
            "data": {"target": "short_data:batches"},
            "model": {"target": "short_data:batches"},
            "loss": {"target": "short_data:batches"},
        }
        return changed(tiny | fields, train={"steps": 7})

    return make


def test_data_with_fewer_batches_than_steps_are_refused_at_the_start(of_length):
    assert data.load(of_length(7)).first == 0
    assert data.load(of_length(3, again=True)).first == 0, "it begins again after its last batch"
    with pytest.raises(
        jpipe.InputError,
        match=r"data\.target: expected train to have batch t for every t < train\.steps 7, found a Short of 6 batches; repeat",
    ):
        data.load(of_length(6))
    place = Position(batch=3, rows=(24,), pieces=8)  # after 3 batches of 8 rows; the next 4 of 4 rows are batches 6 to 9
    assert data.load(of_length(10), place).first == 3
    with pytest.raises(jpipe.InputError, match=r"for every t < 10, for the rows up to train\.steps 7, found a Short of 9"):
        data.load(of_length(9), place)
