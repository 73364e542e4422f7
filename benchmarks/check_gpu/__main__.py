"""`python -m benchmarks.check_gpu [PART …]`: check jpipe on one NVIDIA GPU, within ten minutes.

Several processes share the GPU and exchange arrays over NCCL: NCCL takes them for hosts of their own, because each has another
`NCCL_HOSTID`, and sends through the loopback interface. Then throughput, dispatch and memory are measured, and the tests of numbers take
the remaining time. A part that fails or takes too long is written down as such, and the next one begins. From the results
`python -m benchmarks.tables` makes tables of the documentation. `--rehearse` runs all parts on CPU devices with tiny sizes, over gloo.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.check_gpu.parts import PARTS, Part
from benchmarks.check_gpu.tables import RESULTS

ROOT = pathlib.Path(__file__).parents[2]
_REHEARSAL = ROOT / "build" / "check-gpu.json"
_DESCRIBE = "import json; from benchmarks.machine import describe; print(json.dumps(describe()))"
_START_LIMIT = 120.0  # seconds for JAX to start the device
_GRACE = 5.0  # seconds from the interrupt of a part to its end
_MOST_TESTS = 100  # of a part that are all listed; of more, those that did not pass
_NEWEST_DRIVER = 580  # the first that CUDA 13 supports


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, print their progress, and write what was found after each.

    Args:
        arguments: of the command line, by default those of this process.

    Returns:
        The exit code: 0 if all parts have passed, 1 if one has not, 2 without a GPU that JAX can use.
    """
    options = _options(arguments)
    file, end = options.json or (_REHEARSAL if options.rehearse else RESULTS), time.monotonic() + 60 * options.minutes
    parts = [part for part in PARTS if not options.names or part.name in options.names]
    with tempfile.TemporaryDirectory(prefix="jpipe-check-") as folder:
        environment = _environment(options.rehearse, folder)
        try:
            machine = _machine(options.rehearse, environment)
        except LookupError as error:
            print(f"check-gpu: {error.args[0]}", file=sys.stderr)
            return 2
        commit = options.commit or _output("git", "describe", "--always", "--dirty", "--abbrev=12") or "unknown"
        results: dict[str, Any] = {"machine": machine, "commit": commit, "rehearsal": options.rehearse, "parts": {}}
        print(f"{machine['device']}, driver {machine['driver']}, jax {machine['jax']}, commit {commit}", flush=True)
        for i, part in enumerate(parts):
            limit = max(end - time.monotonic(), 0.0) * part.share / sum(other.share for other in parts[i:])
            try:
                results["parts"][part.name] = found = _run(part, limit, options.rehearse, environment)
            finally:
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            print(f"== {part.name}: {_in_words(found)}\n", flush=True)
    for part in parts:
        print(f"{part.name:<32} {_in_words(results['parts'][part.name])}")
    print(f"written to {os.path.relpath(file)}" + ("" if options.rehearse else "; `python -m benchmarks.tables` puts it into the pages"))
    return int(any(found["outcome"] != "passed" for found in results["parts"].values()))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check_gpu", description=(__doc__ or "").splitlines()[0])
    names = [part.name for part in PARTS]
    parser.add_argument("names", nargs="*", metavar="PART", help=f"which to run, by default all: {'; '.join(names)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all parts together (default: %(default)g)")
    parser.add_argument("--rehearse", action="store_true", help="on CPU devices, with tiny sizes")
    parser.add_argument(
        "--json", type=pathlib.Path, help=f"default: {RESULTS.relative_to(ROOT)}; in a rehearsal {_REHEARSAL.relative_to(ROOT)}"
    )
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"unknown part '{unknown[0]}'; known: {'; '.join(names)}")
    return options


def _environment(rehearse: bool, folder: str) -> dict[str, str]:
    """Return the variables of all parts. Compiled programs are shared through the folder."""
    paths = [*(str(ROOT / name) for name in ("", "planner", "train")), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JPIPE_TEST_CACHE": folder,
        "XDG_CACHE_HOME": folder,
        "JAX_COMPILATION_CACHE_DIR": os.path.join(folder, "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if rehearse:
        return os.environ | shared | {"JAX_PLATFORMS": "cpu", "JPIPE_CHECK": "rehearse"}
    gpu, _, _ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")
    nccl = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_DEBUG": "WARN"}
    return os.environ | shared | nccl | {"CUDA_VISIBLE_DEVICES": gpu or "0", "JAX_LOCAL_DEVICE_IDS": "0"}


def _machine(rehearse: bool, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return a description of the machine.

    Raises:
        LookupError: there is no GPU, or none that JAX can use; the message says what to do.
    """
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    if not rehearse and not driver:
        raise LookupError("expected an NVIDIA GPU, found none (nvidia-smi lists none); --rehearse goes through all parts on CPU devices")
    described = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", _DESCRIBE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_START_LIMIT, check=False
    )
    lines = described.stdout.splitlines()
    machine = json.loads(lines[-1]) if described.returncode == 0 else None
    if machine is None or (machine["platform"] != "gpu" and not rehearse):
        found = f"JAX sees {machine['device']} only" if machine else (described.stderr.splitlines() or ["JAX does not start"])[-1]
        extra = "cuda13" if int(driver.partition(".")[0] or 0) >= _NEWEST_DRIVER else "cuda12"
        raise LookupError(
            f"expected a GPU that JAX can use, found: {found}; install JAX for driver {driver}: "
            f"{sys.executable} -m pip install -c constraints.txt -e '.[dev,{extra}]'"
        )
    return {**machine, "driver": driver or "none"}


def _run(part: Part, limit: float, rehearse: bool, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a part, print its output, and return how it ended and what it found."""
    if not limit:
        return {"outcome": "not run: no time was left", "seconds": 0.0}
    print(f"== {part.name}, at most {limit:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="jpipe-part-") as folder:
        file = pathlib.Path(folder, "results")
        own = {"JPIPE_CHECK_RESULTS": str(file), "JPIPE_CHECK_LIMIT": str(max(limit - 10, 1))} if part.has_tests else {}
        command = [sys.executable, *(part.rehearsal if rehearse else part.command), *(() if part.has_tests else ("--json", str(file)))]
        begin, last = time.monotonic(), collections.deque[str](maxlen=60)
        process = subprocess.Popen(  # noqa: S603 - our own programs
            command,
            cwd=ROOT,
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # it is ended with its children
        )
        reader = threading.Thread(target=_copy, args=(process, last), daemon=True)
        reader.start()
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        reader.join(_GRACE)  # a process outside the session may still hold the pipe
        found: dict[str, Any] = {"seconds": time.monotonic() - begin, "limit": limit, "command": ["python", *command[1:]]}
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if part.has_tests:
            tests = [json.loads(line) for line in text.splitlines()]
            found["counts"] = dict(collections.Counter(test["outcome"] for test in tests))
            found["tests"] = tests if len(tests) <= _MOST_TESTS else [test for test in tests if test["outcome"] != "passed"]
        elif text:
            found["figures"] = json.loads(text)["figures"]
        is_complete = code == 0 and bool(found.get("counts") or found.get("figures"))
        outcome = "passed" if is_complete else "cut off" if code is None else "failed"
        return {"outcome": outcome, **found} | ({} if outcome == "passed" else {"exit code": code, "says": list(last)})


def _copy(process: subprocess.Popen[str], last: collections.deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            print(f"   {line}", end="", flush=True)
            last.append(line.rstrip("\n"))


def _end(process: subprocess.Popen[str]) -> None:
    """End a part and its children, if it still runs."""
    for number in (signal.SIGINT, signal.SIGKILL) if process.poll() is None else ():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


def _in_words(found: Mapping[str, Any]) -> str:
    words = ", ".join(f"{count} {outcome}" for outcome, count in found.get("counts", {}).items())
    return f"{found['outcome']}, {found['seconds']:.0f} s" + (f": {words}" if words else "")


def _output(program: str, *arguments: str) -> str:
    """Return what a program prints, or "" if it is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    done = subprocess.run([path, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
