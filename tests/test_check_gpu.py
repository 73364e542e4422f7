"""The check of one GPU, rehearsed on CPU devices: parts run, fail, and are cut off, and tables are made from the results."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import tables as of_pages
from benchmarks.check_gpu import __main__ as check
from benchmarks.check_gpu.parts import PARTS, Part
from benchmarks.check_gpu.tables import tables

MACHINE = {"device": "a GPU", "platform": "gpu", "driver": "580.1", "jax": "0.12"}
ENDS = """
import json, os, pathlib, sys
path = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
"""


def part(name: str, share: float, code: str) -> Part:
    return Part(name, share, ("-c", ENDS + code), ("-c", "raise SystemExit('rehearsed')"))


@pytest.fixture
def parts(monkeypatch):
    """Return a function that replaces the parts."""
    monkeypatch.setattr(check, "_machine", lambda rehearse, environment: MACHINE)
    return lambda *parts: monkeypatch.setattr(check, "PARTS", parts)


def results(file: Path, *arguments: str) -> tuple[int, dict]:
    code = check.main(["--json", str(file), *arguments])
    return code, json.loads(file.read_text(encoding="utf-8"))


def test_what_fails_or_takes_too_long_is_written_down_and_the_rest_goes_on(parts, tmp_path, capfd):
    child = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('waits', flush=True)"
    )
    parts(
        part("broken", 50, "print('no memory'); sys.exit(3)"),
        part("endless", 2, f"{child}; time.sleep(60)"),
        part("empty", 50, "pass"),
        part("good", 50, "path.write_text(json.dumps({'figures': {'a': os.environ['XLA_PYTHON_CLIENT_ALLOCATOR']}}))"),
    )
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "from here")
        code, found = results(tmp_path / "results.json", "--commit", "abc", "--minutes", "3")
    assert code == 1
    assert time.monotonic() - begin < 50
    assert (found["machine"], found["commit"], found["rehearsal"]) == (MACHINE, "abc", False)
    ends = {name: (each["outcome"], each.get("exit code")) for name, each in found["parts"].items()}
    assert ends == {"broken": ("failed", 3), "endless": ("cut off", None), "empty": ("failed", 0), "good": ("passed", None)}
    assert found["parts"]["broken"]["says"] == ["no memory"]
    assert found["parts"]["endless"]["says"][0] == "waits"
    assert found["parts"]["good"]["figures"] == {"a": "from here"}
    assert "   no memory" in capfd.readouterr().out


def test_all_parts_together_take_no_more_than_the_budget(parts, tmp_path):
    wait = "import time; time.sleep(60)"
    parts(part("first", 1, "path.write_text(json.dumps({'figures': {'a': 1}}))"), part("second", 1, wait), part("third", 2, wait))
    begin = time.monotonic()
    code, found = results(tmp_path / "results.json", "--minutes", "0.1")
    assert code == 1
    assert time.monotonic() - begin < 30
    first, second, third = found["parts"].values()
    assert [each["outcome"] for each in (second, third)] == ["cut off", "cut off"]
    assert 1.4 < first["limit"] < 1.6
    assert second["limit"] > (6 - 1.5) / 3 - 0.5, "what the first has left is divided among the others"
    assert first["limit"] + second["limit"] < 6


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(check, "_output", lambda program, *arguments: "")
    assert check.main([]) == 2
    assert "expected an NVIDIA GPU, found none" in capsys.readouterr().err


@pytest.mark.parametrize(("driver", "extra"), [("580.159.03", "cuda13"), ("550.54", "cuda12")])
def test_with_a_gpu_that_jax_does_not_see_it_says_what_to_install(driver, extra, monkeypatch, capsys):
    monkeypatch.setattr(check, "_output", lambda program, *arguments: driver if program == "nvidia-smi" else "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert check.main([]) == 2
    assert capsys.readouterr().err.endswith(f"{sys.executable} -m pip install -c constraints.txt -e '.[dev,{extra}]'\n")


@pytest.mark.parametrize(
    "names", [pytest.param(["killed-process", "memory"], marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.exhaustive)]
)
def test_a_rehearsal_passes(names, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # a worker of its own tests would leave the results to another process
    code, found = results(tmp_path / "results.json", *names, "--rehearse", "--minutes", "60")
    assert {name: each["outcome"] for name, each in found["parts"].items()} == dict.fromkeys(
        names or [part.name for part in PARTS], "passed"
    ), found
    assert code == 0
    made = tables(tmp_path / "results.json")
    assert all(len(row) == len(table.head) for table in made for row in table.rows)
    text = (of_pages.PAGES / "gpu.md").read_text(encoding="utf-8")
    assert all(f"<!-- {table.name} -->\n" in text for table in made)
    assert names or len(made) == 4


def test_tables_show_what_was_found(tmp_path):
    parts = {
        "two-processes": {"outcome": "failed", "seconds": 30.4, "counts": {"passed": 2, "failed": 1}},
        "killed-process": {"outcome": "cut off", "seconds": 25.0, "counts": {}},
        "throughput-pipedream_flush": {
            "figures": {
                "one jitted step": {"sequences/s": 150.0},
                "four": {"sequences/s": 149.0, "model FLOPs utilization": 0.35, "of the jitted step": 0.99},
            }
        },
        "dispatch": {
            "figures": {
                "dispatch: µs of one call": 29.4,
                "dispatch, gpipe: µs per microbatch, 4 stages": 1019.0,
                "dispatch, gpipe: µs per instruction (4 per microbatch)": 45.3,
            }
        },
        "memory": {"figures": {"GB": 15.4}},
        "host-memory": {"figures": {"GB": 12.16, "GB/s to host memory": 50.0}},
    }
    (tmp_path / "results.json").write_text(json.dumps({"parts": parts}))
    made = {table.name: [[*map(str, row)] for row in table.rows] for table in tables(tmp_path / "results.json")}
    assert made == {
        "processes on a GPU": [["two-processes", "failed", "30", "2 passed, 1 failed"], ["killed-process", "cut off", "25", ""]],
        "throughput on a GPU": [["one jitted step", "150.0", "", ""], ["four", "149.0", "35.0%", "0.99"]],
        "dispatch on a GPU": [["`gpipe`", "1,019 µs", "45.3 µs"], ["one call", "", "29.4 µs"]],
        "memory on a GPU": [["GB", "15.4", "12.16"], ["GB/s to host memory", "", "50"]],
    }
    assert tables(tmp_path / "missing.json") == []
