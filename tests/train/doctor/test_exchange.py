"""Processes exchange facts, compare clocks and look for a file; here they are threads with a channel between them."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jpipe.processes import Processes
from jpipe_train.doctor import exchange
from jpipe_train.doctor.exchange import Clock

LIMIT = 60.0  # seconds, for what takes one


class Meeting:
    """A store in memory, by which the processes find each other."""

    host = "127.0.0.1"

    def __init__(self, index: int, count: int, values: "queue.Queue[str]") -> None:
        self.index, self.count, self._values = index, count, values

    def put(self, value: str) -> None:
        for _ in range(self.count - 1):
            self._values.put(value)

    def get(self, seconds: float) -> str:
        return self._values.get(timeout=seconds)


def in_all(function, count=3):
    """Return the results of a function of the processes, called in all of them at once."""
    values: queue.Queue[str] = queue.Queue()

    def of_one(index):
        processes = Processes.join(store=Meeting(index, count, values), limit=LIMIT)
        try:
            return function(processes)
        finally:
            processes.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(of_one, range(count)))


def test_process_0_gets_the_texts_of_all():
    first, *others = in_all(lambda processes: exchange.collect(processes, "facts", f"ä {processes.index} " + "x" * 70_000))
    assert [text[:4] for text in first] == ["ä 0 ", "ä 1 ", "ä 2 "]
    assert others == [[], []]


def test_clocks_are_compared_to_within_the_round_trip():
    import time

    ahead = {0: 0.0, 1: 100.0, 2: -7.5}
    clocks = in_all(lambda processes: exchange.compare_clocks(processes, lambda: time.monotonic() + ahead[processes.index]))
    assert clocks[0] == Clock(0.0, 0.0, 0.0)
    for index in (1, 2):
        assert abs(clocks[index].offset - ahead[index]) <= clocks[index].uncertainty + 1e-9
        assert clocks[index].uncertainty == clocks[index].round_trip / 2 > 0


def test_the_quickest_answer_counts():
    samples = [(0.0, 5.0, 8.0), (10.0, 12.0, 10.4), (20.0, 30.0, 21.0)]
    clock = exchange.quickest(samples)
    assert (clock.offset, clock.uncertainty, clock.round_trip) == pytest.approx((-1.8, 0.2, 0.4))


def test_a_folder_of_another_host_is_recognized(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "other").mkdir()
    folders = {0: tmp_path / "shared", 1: tmp_path / "shared", 2: tmp_path / "other"}
    assert in_all(lambda processes: exchange.see_same_folder(processes, folders[processes.index], limit=0.3)) == [True, True, False]
    assert [*(tmp_path / "shared").iterdir()] == [], "the file is removed"


@pytest.mark.parametrize("folder", [None, "missing"])
def test_where_process_0_cannot_write_nothing_is_known(folder, tmp_path):
    found = in_all(lambda processes: exchange.see_same_folder(processes, None if folder is None else tmp_path / folder, limit=0.3), 2)
    assert found == [None, None]


def test_no_thread_is_left():
    assert not [thread.name for thread in threading.enumerate() if thread.name == "jpipe-processes"]
