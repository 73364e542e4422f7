"""Real processes train what one process trains, bit for bit; a death ends all; a plan that does not fit is refused in all.

What they run, and the cases, are in several.py.
"""

import contextlib
import re
import time

import numpy as np
import pytest

from tests.jpipe.several import BATCHES, CASES, INLINE, started

LIMIT = 240  # seconds for all of them together; only a deadlock comes near


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By number of processes, what each of them found. All are started at once, and share the cores of this machine."""
    folder, ends = tmp_path_factory.mktemp("several"), time.monotonic() + LIMIT
    with contextlib.ExitStack() as all_:
        processes = {count: all_.enter_context(started("train", count, folder)) for count in (1, *CASES)}
        for count, of_count in processes.items():
            for index, process in enumerate(of_count):
                code, text = process.wait(max(ends - time.monotonic(), 0.1)), (folder / f"{count}.{index}.txt").read_text()
                assert code == (1 if count == 4 else 0), text
                if count == 4:
                    _assert_tells_what_nobody_caught(index, text.splitlines()[-1])
    return {count: [dict(np.load(folder / f"{count}.{index}.npz")) for index in range(count)] for count in processes}


def _assert_tells_what_nobody_caught(index: int, line: str) -> None:
    """Of the four, process 1 ends by an error when it has found all; the others have too, or nearly."""
    how = "jpipe: process 1 stopped: ValueError: nobody catches this; process"
    assert line.startswith("ValueError: nobody catches this" if index == 1 else f"{how} {index} stops")


def of_case(case: str, numbers: dict) -> dict:
    return {name.removeprefix(f"{case}: "): value for name, value in numbers.items() if name.startswith(f"{case}: ")}


@pytest.mark.parametrize(
    ("case", "as_case", "count"),
    [(case, case, count) for count, cases in CASES.items() for case in cases] + [(case, f"inline {case}", 2) for case in INLINE],
)
def test_several_processes_find_the_bits_of_one(case, as_case, count, found):
    (expected,) = (of_case(case, numbers) for numbers in found[1])
    each = [of_case(as_case, numbers) for numbers in found[count]]
    assert {name for numbers in each for name in numbers} == set(expected)
    told = {name for name in expected if re.match(r"(losses|weights|norms) \d|.* (in flight|at the end)$", name)}
    assert len(told) == BATCHES * (3 if any("norms" in name for name in told) else 2) + 2 * 7
    for numbers in each:
        assert told < set(numbers), "losses, norms and evaluations are known in all processes, and each holds some layers"
        for name, value in numbers.items():
            assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype)
            assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize(
    ("case", "count"), [(case, count) for count, cases in CASES.items() for case, fields in cases.items() if "replicas" in fields]
)
def test_replicas_in_several_processes_end_with_the_mean_of_their_layer_state(case, count, found):
    means: dict[str, set[bytes]] = {}
    for numbers in found[count]:
        for name, value in of_case(case, numbers).items():
            if match := re.match(r"state of worker \d+(.*)\['mean'\]$", name):
                means.setdefault(match[1], set()).add(value.tobytes())
    assert len(means) == 2, "layers with state"
    assert all(len(values) == 1 for values in means.values()), "one mean for all replicas of a layer"


@pytest.mark.parametrize("count", CASES)
def test_a_plan_with_fewer_workers_than_processes_is_refused_in_all_with_both_grids(count, found):
    devices = [rf"  process {index}: cpu:\d+" for index in range(count)]
    message = [
        rf"plan: expected at least as many workers as devices in a run of {count} processes, found 1 workers for {count} devices; "
        "change stages, replicas or the number of processes, or name the devices in placement",
        "workers:",
        "  stage 0: w0",
        "devices:",
        *devices,
    ]
    for numbers in found[count]:
        assert re.fullmatch("\n".join(message), str(numbers["refused"]))


def test_when_a_process_is_killed_the_other_names_it_and_what_it_waited_for(tmp_path):
    with started("endless", 2, tmp_path) as (other, victim):
        ends = time.monotonic() + LIMIT
        while not (tmp_path / "2.1.npz").exists():
            assert victim.poll() is None, (tmp_path / "2.1.txt").read_text()
            assert time.monotonic() < ends
            time.sleep(0.05)
        victim.kill()
        assert other.wait(60) != 0
        last = (tmp_path / "2.0.txt").read_text().splitlines()[-1]
    assert re.fullmatch(
        r".*process 1 disconnected unexpectedly: it was killed or crashed, see its own output; "
        r"process 0 stops while waiting for (the gradient of microbatch \d+ from worker 1|"
        r"worker 1 to take the activation of microbatch \d+) of process 1",
        last,
    )
