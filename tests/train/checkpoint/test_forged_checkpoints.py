"""Foreign checkpoints with valid hashes: their claims are checked before they cost memory or time."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import yaml
from rich.console import Console

import jpipe
from jpipe.checkpoints import Checkpoint, newest
from jpipe.checkpoints.records import Damaged, describe, marker_text
from jpipe.checkpoints.writing import complete, write_layers
from jpipe.runtime._plain import to_plain
from jpipe_train.assemble.build import build, param_specs
from jpipe_train.checkpoint import export
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.checkpoint.resume import Facts, Resumed, find
from jpipe_train.config.config import Config, PlanConfig
from jpipe_train.config.config_file import record, to_yaml
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from jpipe_train.run.starting import read_checkpoint
from tests.train.checkpoint.written import FACTS
from tests.train.conftest import changed

LAYERS = {"layer": {"params": {"0": {"w": np.arange(6.0).reshape(2, 3), "large": np.zeros((40, 40))}}}}
# TensorStore reports requests that are still running where Orbax has failed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    write_layers(folder, 20, LAYERS, 0)
    complete(folder, 20, 1, FACTS, b'{"step": 0, "loss": 1.5}\n')
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def place(run) -> Path:
    return run / "checkpoints" / "20"


def seal(place: Path, facts: object = FACTS, layers: tuple = ("layer",)) -> None:
    """Give what is in the folder the hashes that fit."""
    paths = [path for path in place.rglob("*") if path.is_file() and path.suffix not in (".json", ".jsonl")]
    index = {path.relative_to(place).as_posix(): describe(path) for path in paths}
    (place / "process-0.json").write_text(json.dumps({"layers": layers, "files": {}}))
    digests = [hashlib.sha256((place / name).read_bytes()).hexdigest() for name in ("process-0.json", "metrics.jsonl")]
    (place / "checkpoint.json").write_text(marker_text(20, {"process-0.json": digests[0]}, digests[1], facts, index))


def rewrite(place: Path, **values: bytes) -> None:
    """Put other values into the store of the item."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{place / 'default'}/"}}).result()
    for key, value in values.items():
        store.write(key, value).result()


def header(**changes: object) -> bytes:
    """Return the `.zarray` of the array "w" as jpipe writes it, with these changes."""
    data: dict = {"zarr_format": 2, "shape": [2, 3], "chunks": [2, 3], "dtype": "<f8", "order": "C", "fill_value": None, "filters": None}
    return json.dumps(data | {"compressor": None, "dimension_separator": "."} | changes).encode()


W = "layer.params.0.w/"
HEADERS = {
    "terabytes": (header(shape=[10**6, 10**7], chunks=[10**6, 10**7]), r"ValueError: it declares arrays of 80,000,000,012,800 bytes, but"),
    "pieces": (header(shape=[10**6, 10**7], chunks=[1, 1]), r"ValueError: it declares arrays of 80,000,000,012,800 bytes, but"),
    "overflow": (header(shape=[2**40] * 20, chunks=[2**40] * 20), "Product of chunk dimensions"),
    "bomb": (header(compressor={"id": "zlib", "level": 9}), r"inflate\(\) failed"),
    "filter": (header(filters=[{"id": "gzip"}]), "filters are not supported"),
    "chunks": (header(chunks=[1, 1]), "End of data expected; remaining length: 40|chunk .* is missing"),
    "large chunks": (header(chunks=[10**6, 10**7]), r"ValueError: 'layer\.params\.0\.w' has chunks of shape \[1000000, 10000000\], larger"),
    "fill": (header(shape=[3, 3], chunks=[3, 3]), r"Not enough data: expected at least 72"),
    "negative": (header(shape=[-1, 3]), 'parsing object member "shape"'),
    "text": (header(shape="23"), 'parsing object member "shape"'),
    "objects": (header(dtype="|O"), "Unsupported zarr dtype"),
    "long text": (header(dtype="<U1000000000"), "Unsupported zarr dtype"),
    "deep": (b"[" * 60_000, "Invalid JSON"),
    "none": (b"", "Invalid JSON"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_arrays_that_are_not_what_the_files_hold_are_refused_before_they_are_read(run, place, kind):
    content, reason = HEADERS[kind]
    rewrite(place, **{f"{W}.zarray": content})
    seal(place)
    with pytest.raises(Damaged, match=rf"default: is no Orbax item as jpipe writes it .*{reason}"):
        Checkpoint(run, 20).read()


def test_a_chunk_larger_than_declared_is_refused(run, place):
    rewrite(place, **{f"{W}0.0": b"\0" * 3_000_000})
    seal(place)
    with pytest.raises(Damaged, match="End of data expected; remaining length: 2999952"):
        Checkpoint(run, 20).read()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data | {"use_zarr3": True}, "expected Zarr arrays, version 2, in an OCDBT store"),
        (lambda data: data | {"use_ocdbt": False}, "expected Zarr arrays, version 2, in an OCDBT store"),
        (lambda data: [], "TypeError"),
        (lambda data: data | {"tree_metadata": {"x": 1}}, "TypeError"),
        (lambda data: data | {"tree_metadata": {}}, "KeyError: 'layer'"),
        (lambda data: data | {"tree_metadata": {"x": entry(["layer"] * 65)}}, "expected at most 64 nested dicts"),
        (lambda data: data | {"tree_metadata": {"x": entry(["layer", "a.b"])}}, "the index lacks the array 'layer.a.b'"),
        (lambda data: data | {"tree_metadata": {"x": entry(["layer", "w"], "jax.Array")}}, "the index lacks the array 'layer.w'"),
        (
            lambda data: data | {"use_ocdbt": False, "tree_metadata": {"x": entry(["../../../secret"])}},
            "expected names without '/'",
        ),
        (lambda data: data | {"tree_metadata": {"x": entry(["layer", "params", "0", "w"], "string")}}, "found something else in 'layer'"),
        (lambda data: data | {"tree_metadata": {"x": entry(["layer.params.0.w"])}}, "found an array as 'layer.params.0.w'"),
        (lambda data: data | {"tree_metadata": {"x": entry(["layer"], "Dict"), "y": entry(["layer", "x"], "Dict")}}, None),
    ],
)
def test_trees_that_jpipe_does_not_write_are_refused(run, place, change, reason):
    file = place / "default" / "_METADATA"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    seal(place)
    if reason is None:
        assert Checkpoint(run, 20).read() == {"layer": {"x": {}}}
        return
    for read in (Checkpoint.read, Checkpoint.specs):
        with pytest.raises(Damaged, match=rf"default: is no Orbax item as jpipe writes it \(.*{reason}"):
            read(Checkpoint(run, 20))


def entry(names: list[str], kind: str = "np.ndarray") -> dict:
    return {
        "key_metadata": [{"key": name, "key_type": 2} for name in names],
        "value_metadata": {"value_type": kind, "skip_deserialize": kind == "Dict"},
    }


def test_metadata_nested_without_end_is_refused(run, place):
    (place / "default" / "_METADATA").write_text("[" * 100_000)
    seal(place)
    with pytest.raises(Damaged, match="RecursionError"):
        Checkpoint(run, 20).read()


def test_a_path_that_is_not_a_file_fails_at_once(run, place):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(place / "default" / "d" / "more")
        with pytest.raises(Damaged, match=r"default/d/more: is no regular file, was not written by jpipe"):
            Checkpoint(run, 20).verify()
        with pytest.raises(Damaged, match=r"default/d/more: is no regular file, was not written by jpipe"):
            Checkpoint(run, 20).specs()
        (place / "default" / "d" / "more").unlink()
    (place / "process-0.json").unlink()
    os.mkfifo(place / "process-0.json")
    with pytest.raises(Damaged, match=r"process-0\.json: is missing"):
        Checkpoint(run, 20).verify()


@pytest.mark.parametrize(("name", "size"), [("checkpoint.json", 2**23), ("process-0.json", 2**23), ("metrics.jsonl", 2**30)])
def test_endless_records_are_not_read(run, place, name, size):
    os.truncate(place / name, size + 1)  # no blocks on the disk
    messages: list[str] = []
    assert newest(run, lambda damaged: messages.append(str(damaged))) is None
    assert messages[0].startswith(f"{place / name}: is larger than {size:,} bytes, was not written by jpipe")


ROWS = {
    "deep": "[" * 100_000,
    "deep, short": "[" * 50_000,
    "list": "[1]",
    "text": '{"step": 0, "loss": "<script>"}',
    "nested": '{"step": 0, "loss": {"a": 1}}',
    "no step": '{"loss": 1.0}',
    "endless": '{"step": 0, "loss": 1e999}',
    "huge": '{"step": 0, "loss": 1' + "0" * 400 + "}",
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_are_not_numbers_are_refused(run, place, kind):
    (place / "metrics.jsonl").write_text(f'{{"step": 0, "loss": 1.5}}\n{ROWS[kind]}\n')
    seal(place)
    with pytest.raises(
        jpipe.InputError, match=r"step 20, line 2: expected a JSON object of numbers, found .*; restore another checkpoint$"
    ):
        Resumed(run, 20, Facts(**FACTS), (20,)).rows()


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
CONFIGS = {
    "empty": ("", "expected a mapping of keys such as 'train:', found NoneType"),
    "list": ("[1, 2]", "expected a mapping of keys such as 'train:', found list"),
    "tagged": ("!!python/object/apply:os.system [id]", r"found a tag \(!\)"),
    "recursive": ("&a {a: *a}", "found an anchor or alias"),
    "laughs": (BOMB, "found an anchor or alias"),
    "deep": ("{a: " * 1000, "nested too deeply"),
    "dicts": ("a: [" + "{}," * 100_000 + "]", "more than 20,000 values"),
    "long": ("a" * 2_000_000, "expected at most 1,048,576 characters, found 2,000,000"),
    "no text": (3, "expected a valid string, found 3"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_in_checkpoints_are_read_as_carefully_as_those_of_users(run, place, kind):
    config, reason = CONFIGS[kind]
    seal(place, FACTS | {"config": config})
    with pytest.raises(jpipe.InputError, match=rf"checkpoints: step 20: facts: config: .*{reason}"):
        find(str(run), "auto", Team(None), print)


@pytest.mark.parametrize("devices", [-1, 10**400, True, 1.5])
def test_impossible_numbers_of_devices_are_refused(run, place, devices):
    seal(place, FACTS | {"devices": devices})
    with pytest.raises(jpipe.InputError, match="checkpoints: step 20: facts: devices: expected"):
        find(str(run), "auto", Team(None), print)


def test_names_that_are_too_long_for_a_file_are_reported_as_damaged(run, place):
    record = json.loads((place / "process-0.json").read_text())
    record["files"]["a" * 300] = {"size": 1, "sha256": "0"}
    text = json.dumps(record)
    (place / "process-0.json").write_text(text)
    digests = [hashlib.sha256(content).hexdigest() for content in (text.encode(), (place / "metrics.jsonl").read_bytes())]
    (place / "checkpoint.json").write_text(marker_text(20, {"process-0.json": digests[0]}, digests[1], FACTS, {}))
    with pytest.raises(Damaged, match=r"cannot be read .File name too long"):
        Checkpoint(run, 20).verify()


def test_a_checkpoint_without_a_plan_in_its_config_is_still_compared(run):
    resumed = Resumed(run, 20, Facts(**FACTS | {"config": "train: {steps: 3}\nseed: [[]]\n"}), (20,))
    assert resumed.changes(record(Config())) == ["plan", "seed", "train.steps"]


def test_a_new_key_of_a_plan_is_no_change(run):
    before = to_yaml(Config()).replace("  mesh: {}\n", "").replace("  rules: {}\n", "")
    assert "mesh" not in before
    resumed = Resumed(run, 20, Facts(**FACTS | {"config": before}), (20,))
    assert resumed.changes(record(Config())) == []
    assert resumed.changes(record(Config(plan=PlanConfig(mesh={"model": 2})))) == ["plan"]


def test_shapes_are_checked_against_the_model_before_anything_is_read(tiny, monkeypatch, tmp_path):
    config = changed(tiny)
    pipe, batches = build(config, Reporter(1, 1, "tokens", Console(quiet=True)))
    specs = {layer_id: to_plain(specs) for layer_id, specs in param_specs(pipe.stack, pipe.plan, batches.train[0]).items()}
    arrays = jax.tree.map(lambda spec: np.zeros((*spec.shape, 2), spec.dtype), specs)
    write_layers(tmp_path, 20, {layer_id: {"params": {"0": tree}} if tree else {} for layer_id, tree in arrays.items()}, 0)
    facts = FACTS | {"plan": pipe.plan.to_json()}
    complete(tmp_path, 20, 1, facts)
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("the arrays are read"))
    with pytest.raises(jpipe.InputError, match=r"checkpoint: layer '.*', parameters: expected '.*' as in the model, .*, found "):
        read_checkpoint(pipe, batches, Team(None), Resumed(tmp_path, 20, Facts(**facts), (20,)), fresh_optimizer=False)


def test_a_refused_export_prints_one_message_and_writes_nothing(run, place, capfd):
    rewrite(place, **{f"{W}.zarray": HEADERS["terabytes"][0]})
    seal(place)
    lines = list[str]()
    with pytest.raises(jpipe.InputError, match=r"none of the checkpoints in .* is complete and undamaged; give another run"):
        export.write_file(ExportRequest(str(run), str(run / "new.safetensors")), lines.append)
    assert capfd.readouterr() == ("", "")
    (line,) = lines
    assert "it declares arrays of 80,000,000,012,800 bytes" in line
    assert not (run / "new.safetensors").exists()


def test_the_reader_reads_what_the_writer_writes(run):
    restored = Checkpoint(run, 20).read()["layer"]["params"]["0"]
    assert jnp.array_equal(restored["w"], LAYERS["layer"]["params"]["0"]["w"])
    assert yaml.safe_load(Facts(**FACTS).config) == {"train": {}, "plan": {}}
