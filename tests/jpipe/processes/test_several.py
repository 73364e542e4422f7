"""Real processes train what one process trains, bit for bit; a death ends all; a plan that does not fit is refused in all.

What they run, and the cases, are in several.py.
"""

import contextlib
import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest

from jpipe.schedules import SCHEDULES
from tests.jpipe.several import BATCHES, CASES, SHARES_GPU, inline, started

LIMIT = float(os.environ.get("JPIPE_CHECK_LIMIT", 240))  # seconds for all of them together; only a deadlock comes near


IN_CI = "2", "2, meshes"


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.slow if group in IN_CI else pytest.mark.exhaustive) for group in CASES]
)
def test_several_processes_find_the_bits_of_one(group, tmp_path, subtests):
    one, each, ends = trained(group, int(group[0]), tmp_path)
    for case, as_case in [(case, case) for case in CASES[group]] + [(case, f"inline {case}") for case in inline(group)]:
        with subtests.test(as_case):
            # In a run of several processes XLA leaves sums over a mesh to gloo, which adds in another order. Programs for GPUs may differ.
            rounds = "meshes" in group or SHARES_GPU in os.environ
            check_bits(of_case(case, one), [of_case(as_case, numbers) for numbers in each], rounds)
    for case, fields in CASES[group].items():
        with subtests.test(f"layer state of {case}"):
            if "replicas" in fields:
                check_mean_of_layer_state([of_case(case, numbers) for numbers in each])
    if "tied" in CASES[group]:
        with subtests.test("copies of shared parameters in two processes are compared before a checkpoint is complete"):
            check_copies(*each)
    if group == "2, meshes":
        with subtests.test("different meshes are refused in both"):
            for numbers in each:
                assert str(numbers["disagreed"]).startswith("plan differs between processes 0 and 1: ")
    with subtests.test("a plan that does not fit is refused in all, with both grids"):
        check_refusal([str(numbers["refused"]) for numbers in each], 8 if "meshes" in group else len(each))
    with subtests.test("all processes end as they should"):
        for index, (code, text) in enumerate(ends):
            assert code == (1 if len(ends) == 4 else 0), text
            if len(ends) == 4:
                check_uncaught(index, last_lines(text))


def test_the_cases_have_every_schedule():
    assert {case["schedule"] for group, cases in CASES.items() for case in cases.values() if group.startswith("2")} == {*SCHEDULES}


@pytest.mark.exhaustive
def test_layers_of_a_whole_model_in_two_processes_have_the_bits_of_one(tmp_path):
    deadline, files = time.monotonic() + LIMIT, []
    for count in (1, 2):
        with started("whole", "", count, tmp_path) as processes:
            for index, process in enumerate(processes):
                code, text = end_of(process, tmp_path / f"{count}.{index}.txt", deadline)
                assert code == 0, text
                files.append(dict(np.load(tmp_path / f"{count}.{index}.npz")))
    one, *each = files
    for numbers in each:
        assert "expected a process that has all layers" in str(numbers.pop("no model"))
        for name, value in numbers.items():
            assert value.tobytes() == one[name].tobytes(), name
    assert set(each[0]) | set(each[1]) == set(one)
    assert set(each[0]) != set(one)


def trained(group: str, several: int, folder) -> tuple[dict, list[dict], list[tuple[int, str]]]:
    """Train the cases of a group in one process and in several.

    Returns:
        The arrays of the one process, and of each of the others; and the exit code and the output of each of the others.
    """
    deadline, ends = time.monotonic() + LIMIT, []
    with contextlib.ExitStack() as all_:  # all are started at once, and share the cores of this machine
        processes = {count: all_.enter_context(started("train", group, count, folder)) for count in (1, several)}
        for count, of_count in processes.items():
            for index, process in enumerate(of_count):
                ends.append(end_of(process, folder / f"{count}.{index}.txt", deadline))
                assert (folder / f"{count}.{index}.npz").exists(), ends[-1][1]
    one, *each = (dict(np.load(folder / f"{count}.{index}.npz")) for count in processes for index in range(count))
    return one, each, ends[1:]


def end_of(process: subprocess.Popen, output, deadline: float) -> tuple[int, str]:
    """Return the exit code and the output of a process; if it has not ended in time, it prints where it was."""
    try:
        code = process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        process.wait(10)
        pytest.fail(f"a process did not end within {LIMIT:.0f} s:\n{output.read_text()}")
    return code, output.read_text()


def last_lines(text: str) -> list[str]:
    """Return the last line of an output. On a GPU return all lines, because its libraries may print more at the end."""
    return text.splitlines() if SHARES_GPU in os.environ else text.splitlines()[-1:]


def check_uncaught(index: int, lines: list[str]) -> None:
    """Check that a process ends with these words when nobody catches an error of process 1."""
    how = "jpipe: process 1 stopped: ValueError: nobody catches this; process"
    assert any(line.startswith("ValueError: nobody catches this" if index == 1 else f"{how} {index} stops") for line in lines)


def of_case(case: str, numbers: dict) -> dict:
    return {name.removeprefix(f"{case}: "): value for name, value in numbers.items() if name.startswith(f"{case}: ")}


def check_bits(expected: dict, each: list[dict], rounds: bool) -> None:
    assert {name for numbers in each for name in numbers} == set(expected)
    everywhere = {name for name in expected if re.match(r"(losses|weights|norms|nonfinite) \d|.* (in flight|at the end)$", name)}
    assert len(everywhere) == BATCHES * (4 if any("norms" in name for name in everywhere) else 2) + 2 * 7 + 2
    for numbers in each:
        assert everywhere < set(numbers), "losses, norms and evaluations are known in all processes, and each holds some layers"
        for name, value in numbers.items():
            assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype)
            if rounds:
                np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
            else:
                assert value.tobytes() == expected[name].tobytes(), name


def check_mean_of_layer_state(each: list[dict]) -> None:
    """Check that all replicas end with the mean of their layer states."""
    means: dict[str, set[bytes]] = {}
    for numbers in each:
        for name, value in numbers.items():
            if match := re.match(r"state of worker \d+(.*)\['mean'\]$", name):
                means.setdefault(match[1], set()).add(value.tobytes())
    assert len(means) == 2, "layers with state"
    assert all(len(values) == 1 for values in means.values()), "one mean for all replicas of a layer"


def check_copies(first: dict, second: dict) -> None:
    message = "checkpoint of step 4: the copies of 'noise shared w' at stage 0 and at stage 1 are not the same bits after batch 3;"
    assert str(first["copies"]).startswith(message)
    assert str(second["copies"]) == ""
    assert first["saved"].tolist() == [2]


def check_refusal(messages: list[str], devices: int) -> None:
    count = len(messages)
    lines = [rf"  process {index}:" + r" [cg]pu:\d+" * (devices // count) for index in range(count)]
    message = [
        rf"plan: expected at least as many ranks as devices in a run of {count} processes, found 1 ranks for {devices} devices; "
        "change stages, replicas or the number of processes, or name the devices in placement",
        "workers:",
        "  stage 0: w0",
        "devices:",
        *lines,
    ]
    for received in messages:
        assert re.fullmatch("\n".join(message), received)


@pytest.mark.slow
def test_when_a_process_is_killed_the_other_names_it_and_what_it_waited_for(tmp_path):
    with started("endless", "2", 2, tmp_path) as (other, victim):
        ends = time.monotonic() + LIMIT
        while not (tmp_path / "2.1.npz").exists():
            assert victim.poll() is None, (tmp_path / "2.1.txt").read_text()
            assert time.monotonic() < ends
            time.sleep(0.05)
        victim.kill()
        assert other.wait(60) != 0
        text = (tmp_path / "2.0.txt").read_text()
    waits = r"(the (gradient|squares) of microbatch \d+ from worker 1|worker 1 to take the activation of microbatch \d+) of process 1"
    message = (
        r".*process 1 disconnected unexpectedly: it was killed or crashed, see its own output; "
        rf"process 0 stops while waiting for {'.*' if SHARES_GPU in os.environ else waits}"
    )
    assert any(re.fullmatch(message, line) for line in last_lines(text)), text


@pytest.mark.exhaustive
def test_a_process_that_passes_other_arguments_is_named(tmp_path):
    with started("differ", "2", 2, tmp_path) as processes:
        codes = [process.wait(LIMIT) for process in processes]
    texts = [(tmp_path / f"2.{index}.txt").read_text() for index in (0, 1)]
    assert codes == [1, 1], texts
    for index, text in enumerate(texts):
        refusals = {name: str(value) for name, value in np.load(tmp_path / f"2.{index}.npz").items()}
        assert refusals["clip"] == (
            "clip_global_norm differs between processes 0 and 1: '3.0' against '2.0'; start all processes with the same clip_global_norm"
        )
        assert refusals["key"].startswith("key differs between processes 0 and 1: ")
        assert refusals["rows"].startswith("shape of a microbatch differs between processes 0 and 1: ")
        assert re.fullmatch(
            r"the checksum of inputs of batches 1 to 8 differs between processes 0 and 1: '(\w{8})' against '(?!\1)\w{8}'; "
            "pass the same arguments in all processes",
            refusals["step"],
        )
        assert 8 <= int(refusals["at"]) < 16
        assert text.splitlines()[-1] == "jpipe.errors.InputError: nobody catches this"
