"""Problems are recognized in recorded facts, with what to do; facts without problems have none."""

import pytest

from jpipe_train.doctor.checks import Finding, judge, merged, processes, table
from tests.train.doctor.recorded import FACTS, GB, recorded, several

ROWS = ["processes", "versions", "devices", "memory", "shared memory", "run folder", "variables"]


def test_a_host_without_problems_has_a_row_for_everything_and_all_are_ok():
    findings = judge([recorded()])
    assert [finding.what for finding in findings] == ROWS
    assert {finding.level for finding in findings} == {"ok"}
    assert findings[1].found.startswith("python 3.13.1, jpipe 0.3.0, jax 0.12.1, jaxlib 0.12.1, flax")
    assert findings[2].found == "4 × NVIDIA H100, 64.0 GB each for JAX"


def test_processes_without_problems_have_links_too():
    everyone = several({}, {}, {})
    everyone[0]["links"] = {"latency": 2e-4, "bandwidth": 3e9}
    findings = judge(everyone)
    assert [finding.what for finding in findings] == [*ROWS, "links"]
    assert {finding.level for finding in findings} == {"ok"}
    assert findings[0].found == "3 connected: node00 has process 0; node01 has process 1; node02 has process 2"
    assert findings[-1].found == "an array takes 0.20 ms to the next process, and 1 MB goes at 3000 MB/s"


@pytest.mark.parametrize(
    ("changes", "level", "what", "found", "advice"),
    [
        ({"devices": {"error": "no CUDA-capable device"}}, "problem", "devices", "no CUDA-capable device", "try JAX alone"),
        ({"devices": {"platform": "cpu", "kinds": ["cpu"]}}, "problem", "devices", "the CPU, and this host has 4 NVIDIA GPUs, ", "cuda13"),
        ({"devices": {"kinds": ["A100", "V100"]}}, "problem", "devices", "4 × A100 and V100", "CUDA_VISIBLE_DEV"),
        ({"memory": {"available": GB // 2}}, "problem", "memory", "540.0 GB, 0.5 GB free", "--mem"),
        ({"memory": {"available": 2 * GB, "total": 8 * GB}}, "note", "memory", "8.0 GB, 2.0 GB free", "1 GB"),
        ({"shared_memory": {"available": 64e6}}, "problem", "shared memory", "/dev/shm, 0.06 GB free", "--shm-size"),
        ({"shared_memory": {"error": "No such file"}}, "note", "shared memory", "No such file", ""),
        ({"folder": {"error": "Permission denied"}}, "problem", "run folder", "Permission denied", "choose another run.dir"),
        ({"folder": {"available": GB // 2}}, "problem", "run folder", "/shared/runs, 0.5 GB free, 400 MB/s", "free space"),
        ({"folder": {"bytes_per_second": 4e6}}, "note", "run folder", "4 MB/s to disk", "checkpoint.every"),
        ({"folder": {"existing": "/shared"}}, "ok", "run folder", "/shared/runs, not yet there; tried in /shared, ", ""),
        ({"versions": {"error": "broken"}}, "problem", "versions", "broken", "pip install ."),
    ],
)
def test_a_problem_of_a_host_is_recognized(changes, level, what, found, advice):
    (finding,) = [finding for finding in judge([recorded(**changes)]) if found in finding.found]
    assert (finding.level, finding.what) == (level, what)
    assert advice in finding.advice
    assert bool(finding.advice) == bool(advice)


def test_little_shared_memory_matters_only_between_gpus():
    one = recorded(shared_memory={"available": 64e6}, devices={"count": 1}, gpus={"count": 1})
    assert {finding.level for finding in judge([one])} == {"ok"}


@pytest.mark.parametrize(
    ("variables", "level", "found", "advice"),
    [
        ({"JAX_PLATFORMS": "cpu"}, "problem", "JAX_PLATFORMS=cpu leaves out the 4 GPUs", "unset JAX_PLATFORMS"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "problem", "CUDA_VISIBLE_DEVICES=-1 hides all GPUs", "unset"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "problem", "CUDA_VISIBLE_DEVICES= hides all GPUs", "unset"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "note", "CUDA_VISIBLE_DEVICES=2,3 hides the other GPUs of 4", ""),
        ({"XLA_FLAGS": "--xla_x=1"}, "note", "XLA_FLAGS=--xla_x=1 may change results", "in all processes"),
        ({"JAX_ENABLE_X64": "1"}, "note", "JAX_ENABLE_X64=1 may change results", "in all processes"),
    ],
)
def test_a_variable_that_matters_is_recognized(variables, level, found, advice):
    (finding,) = [finding for finding in judge([recorded(environment=variables)]) if finding.what == "variables"]
    assert (finding.level, bool(finding.advice)) == (level, bool(advice))
    assert found in finding.found
    assert advice in finding.advice


def test_variables_that_harm_nothing_are_ok():
    assert {finding.level for finding in judge([recorded(environment={"JAX_PLATFORMS": "cuda,cpu", "http_proxy": "(set)"})])} == {"ok"}


def test_differences_between_processes_name_them():
    other = {"versions": {"jax": "0.12.0", "python": "3.12.1"}, "code": {"jax_enable_x64": "True", "code of jpipe": "0.3.0 abd"}}
    findings = {finding.found: finding for finding in judge(several({}, {}, other)) if finding.level != "ok"}
    assert [(finding.level, found) for found, finding in findings.items()] == [
        ("note", "python differs: 3.13.1 in processes 0-1; 3.12.1 in process 2"),
        ("problem", "jax differs: 0.12.1 in processes 0-1; 0.12.0 in process 2"),
        ("problem", "code of jpipe differs: 0.3.0 abc in processes 0-1; 0.3.0 abd in process 2"),
        ("problem", "jax_enable_x64 differs: False in processes 0-1; True in process 2"),
    ]


def test_a_folder_that_is_not_shared_is_a_problem_of_the_processes_that_do_not_see_it():
    everyone = several({}, {}, {})
    for facts, seen in zip(everyone, (True, False, False), strict=True):
        facts["sees folder"] = seen
    problem = next(finding for finding in judge(everyone) if finding.level == "problem")
    assert problem.found == "processes 1-2: a file that process 0 writes in /shared/runs does not appear"
    assert "that all hosts share" in problem.advice


@pytest.mark.parametrize(
    ("links", "level"),
    [({"latency": 0.02, "bandwidth": 1e9}, "note"), ({"latency": 1e-4, "bandwidth": 1e7}, "note"), ({"error": "gloo"}, "problem")],
)
def test_slow_and_broken_links_are_reported(links, level):
    everyone = several({}, {})
    everyone[0]["links"] = links
    (finding,) = [finding for finding in judge(everyone) if finding.what == "links"]
    assert finding.level == level
    assert finding.advice


def test_what_went_wrong_comes_first_and_missing_processes_are_named():
    lost = Finding("problem", "processes", "process 1 did not connect", "start it")
    findings = judge([recorded(process={"count": 2, "coordinator": "10.0.0.1"})], [lost])
    assert findings[0] == lost
    assert findings[1].found == "2 were expected; the rows below are only about this process, on node07"


def test_every_probe_may_fail():
    """Whatever could not be found out has a row, and nothing raises."""
    for section in FACTS:
        findings = judge([recorded(**{section.replace(" ", "_"): {"error": "no idea"}})])
        assert section in ("process", "code", "gpus") or any(finding.found == "no idea" for finding in findings)
    judge([{section: {"error": "no idea"} for section in FACTS}] * 2)


def test_equal_findings_of_some_processes_are_one():
    low, high = Finding("note", "memory", "1 GB", "more"), Finding("ok", "memory", "9 GB")
    assert merged([[high], [high]]) == [high]
    assert merged([[high], [low], [low]]) == [high._replace(found="process 0: 9 GB"), low._replace(found="processes 1-2: 1 GB")]
    measured = [low._replace(measured=f"{free} GB free", least=free) for free in (7.0, 3.0, 9.0)]
    assert merged([[one] for one in measured]) == [low._replace(found="1 GB, 3.0 GB free (the lowest, in process 1)")]
    assert merged([[measured[0]], [high], [measured[0]]])[0].found == "processes 0, 2: 1 GB, 7.0 GB free"
    assert processes([4, 0, 1, 2, 7]) == "processes 0-2, 4, 7"


def test_the_table_shows_what_to_do_below_what_was_found():
    lines = table([Finding("ok", "devices", "4 × H100"), Finding("problem", "run folder", "it is\nfull", "free space")])
    assert lines == ["ok       devices     4 × H100", "problem  run folder  it is\\nfull", f"{' ' * 21}→ free space", "1 problem, 0 notes"]
