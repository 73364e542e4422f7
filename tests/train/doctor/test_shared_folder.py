"""Processes look for a file of process 0; here they are threads with a channel between them."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jpipe.processes import Processes, Rendezvous
from jpipe_train.doctor import doctor
from jpipe_train.launch.team import Team

LIMIT = 60.0  # seconds, for what takes one


class Meeting:
    """What JAX's store does, in memory, by which the processes find each other."""

    coordinator_address = "127.0.0.1:1"

    def __init__(self, index: int, count: int, values: "queue.Queue[str]") -> None:
        self.process_id, self.num_processes, self._values, self.client = index, count, values, self

    def key_value_set(self, key: str, value: str) -> None:
        for _ in range(self.num_processes - 1):
            self._values.put(value)

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        return self._values.get(timeout=milliseconds / 1000)


def in_all(function, count=3):
    """Return the results of a function of the processes, called in all of them at once."""
    values: queue.Queue[str] = queue.Queue()

    def of_one(index):
        processes = Processes.join(rendezvous=Rendezvous.of_jax(Meeting(index, count, values)), limit=LIMIT)
        try:
            return function(Team(processes))
        finally:
            processes.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(of_one, range(count)))


def test_a_folder_of_another_host_is_recognized(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "other").mkdir()
    folders = {0: tmp_path / "shared", 1: tmp_path / "shared", 2: tmp_path / "other"}
    assert in_all(lambda all_: doctor.see_same_folder(all_, folders[all_.index], limit=0.3)) == [True, True, False]
    assert [*(tmp_path / "shared").iterdir()] == [], "the file is removed"


@pytest.mark.parametrize("folder", [None, "missing"])
def test_where_process_0_cannot_write_nothing_is_known(folder, tmp_path):
    found = in_all(lambda all_: doctor.see_same_folder(all_, None if folder is None else tmp_path / folder, limit=0.3), 2)
    assert found == [None, None]


def test_no_thread_is_left():
    assert not [thread.name for thread in threading.enumerate() if thread.name == "jpipe-processes"]
