"""Another thread reads where the main thread is."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jpipe.processes import _waits
from jpipe.processes._waits import LOOK_AFTER, main_thread_calls

ROOT = Path(__file__).parents[3]


def ask(pool):
    return pool.submit(main_thread_calls).result()


def test_the_calls_are_those_of_the_main_thread_the_innermost_first():
    with ThreadPoolExecutor(1) as pool:
        calls = ask(pool)
    assert threading.current_thread() is threading.main_thread()
    names = [call.partition(" ")[2] for call in calls]
    assert names.index("(ask)") + 1 == names.index("(test_the_calls_are_those_of_the_main_thread_the_innermost_first)")
    assert "(main_thread_calls)" not in names, "those of the thread that asks are not among them"
    assert calls[names.index("(ask)")].startswith("test_main_thread.py:")
    assert any(call.endswith("(test_the_calls_are_those_of_the_main_thread_the_innermost_first)") for call in main_thread_calls()), (
        "by itself"
    )


PROGRAM = """
import sys, threading
from jpipe.processes._waits import main_thread_calls
sys.setswitchinterval(1e-5)
looks = []
thread = threading.Thread(target=lambda: looks.extend(main_thread_calls() for _ in range(2000)))
thread.start()
def call(depth):
    return call(depth - 1) if depth else sum(k for k in range(5))
while thread.is_alive():
    call(15)
print(sum(any(name.endswith("(call)") for name in look) for look in looks) > 0)
"""


def test_the_calls_of_a_running_main_thread_are_read():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_heartbeats_look_at_the_main_thread_rarely_and_only_without_progress(monkeypatch):
    still = 4 * LOOK_AFTER + 1
    looks, progress = [], iter([1, 2, 3, 4, *[4] * still, 5])
    monkeypatch.setattr(_waits, "main_thread_calls", lambda: looks.append("") or ["step.py:12 (step)", "loop.py:3 (run)"])
    waits = _waits.Waits(1.0, lambda: next(progress))
    places = [waits.beat().at for _ in range(4 + still + 1)]
    seen = still - LOOK_AFTER + 1
    assert places == [""] * (4 + still - seen) + ["step.py:12 (step) called by loop.py:3 (run)"] * seen + [""]
    assert len(looks) == 3, "after LOOK_AFTER beats, twice and four times as many"


def test_a_full_disk_gives_no_calls(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert main_thread_calls() == []
