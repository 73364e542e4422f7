"""`jpipe train` in several processes: the losses of one process, a common exit, and output from one process only."""

import contextlib
import errno
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import yaml

from jpipe import InputError, PeerLost, Plan
from jpipe.processes import Processes
from jpipe.processes._coordinator import Coordinator, _differences
from jpipe_planner import Profile
from jpipe_train import cli
from jpipe_train.config import config_file
from jpipe_train.console.exit_codes import code_of
from jpipe_train.launch import distributed, team
from jpipe_train.report.metrics_log import RunStopped, repeatable
from jpipe_train.run import loop
from tests.train.conftest import changed

ROOT = Path(__file__).parents[3]
LIMIT = 120  # seconds, for what takes ten

PARTS = '''
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jpipe
from jpipe_lm.data import windows

pathlib.Path(f"pid-{os.getpid()}").touch()
window = windows.Windows.__getitem__


def noted(self, index):
    """Which process reads a window of the text, and where it listens meanwhile, as Linux tells it."""
    pathlib.Path(f"read-{jax.process_index()}").write_text(" ".join(listens()))
    return window(self, index)


def listens():
    own = {os.path.basename(os.path.realpath(path)) for path in pathlib.Path("/proc/self/fd").glob("*")}
    for table in pathlib.Path("/proc/self/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            _, here, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                yield here.split(":")[0]


windows.Windows.__getitem__ = noted


def linear(inputs, outputs):
    return lambda rngs: nnx.Linear(inputs, outputs, rngs=rngs)


def letters():
    return jpipe.LayerStack({"a": lambda rngs: nnx.Embed(256, 4, rngs=rngs), "b": jnp.tanh, "c": linear(4, 4), "d": linear(4, 256)})


def curves():
    return jpipe.LayerStack({"a": linear(4, 4), "b": jnp.tanh, "c": linear(4, 4)})


class Batches:
    def __init__(self, seed, rows, poisoned):
        self.seed, self.rows, self.poisoned = seed, rows, poisoned

    def __len__(self):
        return 2

    def __getitem__(self, t):
        x = np.random.default_rng((self.seed, t)).normal(size=(self.rows, 4)).astype(np.float32)
        return x, np.sin(x) if t != self.poisoned else x * np.float32("nan")


def batches(seed, batch_size, poisoned=None):
    return Batches(seed, batch_size, poisoned), Batches(seed + 1, batch_size, None)


def squares(outputs, labels):
    return ((outputs - labels) ** 2).sum(), labels.size
'''

CURVES = {
    "model": {"target": "parts:curves"},
    "data": {"target": "parts:batches"},
    "loss": {"target": "parts:squares"},
    "train": {"steps": 10, "batch_size": 8, "eval_every": 5, "trace_batches": 0},
    "plan": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 4},
    "optimizer": {"name": "sgd", "learning_rate": 0.01},
}
LETTERS = CURVES | {
    "model": {"target": "parts:letters", "seq_len": 8},
    "data": {"path": "text.txt", "validation_fraction": 0.3},
    "loss": {},
}
FOREVER = {"train": {"steps": 10**6, "batch_size": 8, "eval_every": 10**6, "trace_batches": 0}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to a folder with the user's code and a text."""
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS)
    Path("text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 100)
    return tmp_path


def command(config: dict, *more: str, name: str = "config.yaml", **sections) -> list[str]:
    """Return arguments of `jpipe` that train `config`, with some keys of some sections replaced."""
    whole = config | {section: config.get(section, {}) | keys for section, keys in sections.items()}
    Path(name).write_text(yaml.safe_dump(whole))
    return ["train", name, "--allow-code", "--set", "run.dir=run", *more]


# Not by a function before exec: threads of JAX run in this process, so it is not to be forked. Tests side by side take a core each.
ON_ONE_CORE = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(cores)]})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextlib.contextmanager
def jpipe(*arguments: str, **variables: str) -> Iterator[subprocess.Popen]:
    """Run the command line in a process on one core, so that its numbers are repeatable, and kill it on exit."""
    with subprocess.Popen(
        [sys.executable, "-c", ON_ONE_CORE, "-m", "jpipe_train.cli", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # what it has launched ends with it


def done(*arguments: str) -> tuple[int, list[str], list[str]]:
    """Run the command line and return its exit code, output lines and error lines."""
    with jpipe(*arguments) as process:
        out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out.splitlines(), err.splitlines()


def rows(name: str) -> list[dict]:
    """Return the rows logged so far, without their times."""
    path = Path(name, "metrics.jsonl")
    return [repeatable(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_rows(number: int) -> None:
    deadline = time.monotonic() + LIMIT
    while len(rows("run")) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def by_hand(*commands: list[str], **of_last: str) -> Iterator[list[subprocess.Popen]]:
    """Start a process for each command, as if on separate hosts, with more environment variables for the last one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags = ["--coordinator", f"127.0.0.1:{listener.getsockname()[1]}", "--num-processes", str(len(commands)), "--process-id"]
    with contextlib.ExitStack() as stack:
        variables = [{}] * (len(commands) - 1) + [of_last]
        yield [stack.enter_context(jpipe(*arguments, *flags, str(i), **variables[i])) for i, arguments in enumerate(commands)]


def endings(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Return the exit code and standard error of each process once all have ended."""
    return [(process.returncode, err) for process, err in [(p, p.communicate(timeout=LIMIT)[1]) for p in processes]]


@pytest.mark.exhaustive
def test_four_stages_in_four_processes_log_what_one_process_logs_and_read_only_what_they_need():
    arguments = command(LETTERS, plan={"num_stages": 4}, train={"trace_batches": 2})
    code, out, err = done("launch", "-n", "4", "--", *arguments)
    assert (code, err) == (0, []), "\n".join(err)
    assert sorted(path.name for path in Path.cwd().glob("read-*")) == ["read-0", "read-3"]  # inputs and labels
    addresses = {place for path in Path.cwd().glob("read-*") for place in path.read_text().split()}
    assert all(place.endswith("7F") or place == "0" * 24 + "01000000" for place in addresses)  # 127.0.0.0/8, or ::1
    assert sys.platform != "linux" or Path("read-0").read_text(), "JAX's coordinator is there, and gloo"
    assert not [line for line in out if line.startswith("[")], "only process 0 speaks"
    assert [line.split() for line in out if line.startswith("stage ")] == [
        ["stage", str(s), f"w{s}", f"p{s}", f"cpu:{s}"] for s in range(4)
    ]
    several = rows("run")
    assert "bubble" in next(line for line in out if line.startswith("step 9 "))
    assert [line.split()[3].strip(",") for line in out if line.startswith("held memory")] == ["0", "1", "2", "3"]
    assert {"timeline.png", "memory.png", "trace.json", "report.html", "tensorboard"} < {path.name for path in Path("run").iterdir()}
    events = json.loads(Path("run/trace.json").read_text())["traceEvents"]
    measured = {
        (event["pid"], event["tid"]) for event in events if event["ph"] == "X" and event["tid"] <= 4
    }  # transfers are below the ranks
    assert len(measured) == 8, "each worker predicted and measured"
    Path("run").rename("several")
    assert done(*arguments)[0] == 0
    assert several == rows("run")
    assert [row["step"] for row in several] == list(range(10))


@pytest.mark.slow
@pytest.mark.exhaustive  # like the text of the test above, but for the format
def test_files_of_tokens_in_two_processes_log_what_one_process_logs():
    assert cli.main(["data", "tokenizer", "text.txt", "--vocab-size", "300", "--out", "t.json"]) == 0
    assert cli.main(["data", "prepare", "text.txt", "--tokenizer", "t.json", "--out", "tokens", "--validation-fraction", "0.3"]) == 0
    data, model = {"format": "tokens", "path": "tokens"}, {"depth": 1, "width": 8, "heads": 2, "seq_len": 8, "vocab_size": 300}
    arguments = command({name: CURVES[name] for name in ("train", "plan", "optimizer")} | {"data": data, "model": model})
    code, _, err = done("launch", "-n", "2", "--", *arguments)
    assert (code, err) == (0, []), "\n".join(err)
    several = rows("run")
    Path("run").rename("several")
    assert done(*arguments)[0] == 0
    assert several == rows("run")


@pytest.mark.exhaustive
def test_replicas_in_two_processes_log_what_one_process_logs():
    arguments = command(CURVES, plan={"schedule": "pipedream", "replicas": [2, 2], "keep_together": "replicas"})
    code, out, err = done("launch", "-n", "2", "--", *arguments)
    assert (code, err) == (0, []), "\n".join(err)
    assert [line.split() for line in out if line.startswith("stage ")] == [
        ["stage", "0", "w0", "p0", "cpu:0", "w1", "p0", "cpu:1"],
        ["stage", "1", "w2", "p1", "cpu:2", "w3", "p1", "cpu:3"],
    ]
    several = rows("run")
    Path("run").rename("several")
    assert done(*arguments)[0] == 0
    assert several == rows("run")


@pytest.mark.slow
def test_a_killed_process_is_named_by_the_others_and_no_file_is_incomplete():
    arguments = command(CURVES | FOREVER, plan={"num_stages": 3})
    with by_hand(arguments, arguments, arguments) as processes:
        wait_for_rows(3)
        processes[2].kill()
        results = endings(processes[:2])
    for index, (code, err) in enumerate(results):
        assert code == 1
        how = "process 2 disconnected unexpectedly: it was killed or crashed, see its own output"
        assert err.startswith(f"jpipe: {how}; process {index} stops"), err
        assert err.count("\n") == 1
    assert re.search(r"stops while waiting for the (activation|gradient) of microbatch \d+ from worker \d of process [12]", results[0][1])
    assert [row["step"] for row in rows("run")] == list(range(len(rows("run"))))
    assert not [path for path in Path("run").rglob("*") if "unfinished" in path.name]


@pytest.mark.exhaustive
def test_configs_and_platforms_that_differ_are_refused_with_the_difference():
    commands = command(CURVES), command(CURVES, name="other.yaml", optimizer={"learning_rate": 0.02})
    with by_hand(*commands, JAX_PLATFORMS="cuda") as processes:  # JAX, if it looked for its devices, would never find them
        results = endings(processes)
    mine = os.environ.get("JAX_PLATFORMS", "")
    assert results == [
        (2, "jpipe: config differs between processes 0 and 1: '  learning_rate: 0.01' against '  learning_rate: 0.02' "
            f"(line {line_of('learning_rate')}); start all processes with the same config\n"
            f"JAX_PLATFORMS differs between processes 0 and 1: '{mine}' against 'cuda'; start all processes with the same JAX_PLATFORMS\n"),
        (2, "jpipe: process 1 ends; process 0 says why\n"),
    ]  # fmt: skip
    assert not Path("run").exists()


@pytest.mark.exhaustive
def test_a_process_that_cannot_start_its_devices_says_why_and_ends_the_others():
    with by_hand(*[command(CURVES)] * 2, PJRT_NAMES_AND_LIBRARY_PATHS="none:/no-such-plugin.so") as processes:
        (waiting, waiting_output), (failing, failing_output) = endings(processes)
    assert (waiting, failing) == (1, 2)
    change = "check the environment variable JAX_PLATFORMS"
    assert re.fullmatch(f"jpipe: JAX has no devices to use: [^\n]*no-such-plugin.so[^\n]*; {change}\n", failing_output)
    reason = failing_output.removeprefix("jpipe: ").rstrip()
    assert (
        waiting_output
        == f"jpipe: process 1 stopped: {reason}; process 0 stops while waiting for the devices of all processes, of one kind\n"
    )


def line_of(key: str) -> int:
    """Return the line number of a key in the resolved config."""
    lines = config_file.to_yaml(config_file.load("config.yaml", ["run.dir=run"], allow_code=True)).splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.startswith(f"  {key}:"))


@pytest.mark.exhaustive
def test_a_folder_that_holds_a_run_ends_all_with_one_message():
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    with by_hand(*[command(CURVES)] * 2) as processes:
        results = endings(processes)
    refusal = "expected a new or empty folder, found another run in 'run'; choose another, or move that run away"
    assert results == [(2, f"jpipe: run.dir: {refusal}\n"), (2, "jpipe: process 1 ends; another process says why\n")]


@pytest.mark.exhaustive
def test_a_nan_loss_ends_all_processes_with_one_message():
    code, _, err = done("launch", "-n", "2", "--", *command(CURVES, data={"arguments": {"poisoned": 3}}))
    assert code == 1
    hint = "lower optimizer.learning_rate or raise optimizer.warmup_steps; the steps logged so far are in run"
    anew = "jpipe: there is no checkpoint, so the same command with --set run.dir=run begins anew"
    assert [line for line in err if not re.match(r"(\[1\] )?jpipe: process ", line)] == [f"jpipe: step 3: the loss is nan; {hint}", anew]
    assert [row["step"] for row in rows("run")] == [0, 1, 2]


@pytest.mark.exhaustive
def test_ctrl_c_ends_the_tree():
    with jpipe("launch", "-n", "2", "--", *command(CURVES | FOREVER)) as process:
        wait_for_rows(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGINT
    assert re.search(
        r"stopped by Ctrl-C; the checkpoint of step \d+ is written, and the same command with --set run.dir=run resumes there", out
    )
    assert "Traceback" not in out + err
    numbers = [int(path.name.removeprefix("pid-")) for path in Path.cwd().glob("pid-*")]
    assert len(numbers) == 2
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


MEASURING = """
from jpipe_train.plan import trial
trial.SECONDS = 0.0
"""

FAILING = """
def broken(self):
    if jax.process_index() == 1:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")
    return whole(self)


whole, trial.Running.round = trial.Running.round, broken
"""


def planning(*more: str, code: str = "", name: str = "config.yaml", **sections) -> list[str]:
    """Return arguments of `jpipe` that plan for a model of three layers and run two plans, with quick rounds and an invented profile."""
    Path("parts.py").write_text(PARTS + MEASURING + code)
    at = [{"forward": 0.001, "backward": 0.002, "outputs": 64, "residuals": {"none": 64, "full": 16}}]
    layers = [{"id": name, "weights": 80, "optimizer": 0, "at": at} for name in "abc"]
    profile = Profile(source="measured", sizes=(4,), inputs=(64,), labels=(64,), layers=layers)
    Path("profile.json").write_text(profile.to_json())
    _, *arguments = command(CURVES, name=name, **sections)
    return ["plan", *arguments, "--profile=profile.json", "--schedules=gpipe,pipedream_2bw", "--measure=2", *more]


@pytest.mark.slow
def test_two_processes_measure_plans_together():
    code, out, err = done("launch", "-n", "2", "--", *planning("--out=plan.json", "--profile-out=written.json"))
    assert (code, err) == (0, []), "\n".join(err)
    assert not [line for line in out if line.startswith("[")], "only process 0 speaks"
    (head,) = [number for number, line in enumerate(out) if line.endswith("least to most  off by")]
    assert [bool(re.search(r"[+-]\d+%$", line)) for line in out[head + 1 : head + 3]] == [True, True]
    plan = Plan.from_json(Path("plan.json").read_text())
    assert len(plan.workers) == 2
    assert Profile.from_json(Path("written.json").read_text()).ids == ("a", "b", "c")


@pytest.mark.slow
def test_a_plan_that_fails_in_one_process_ends_all_with_a_line_each():
    arguments = planning(code=FAILING)
    with by_hand(arguments, arguments) as processes:
        (waiting, waiting_output), (failing, failing_output) = endings(processes)
    assert (waiting, failing) == (1, 2), (waiting_output, failing_output)
    assert re.fullmatch(r"jpipe: --measure: .* cannot run here: INTERNAL: broken; leave --measure out, or measure fewer\n", failing_output)
    reason = failing_output.removeprefix("jpipe: ").rstrip()
    assert waiting_output.startswith(f"jpipe: process 1 stopped: {reason}; process 0 stops")  # and while waiting for what, if it waits
    assert waiting_output.count("\n") == 1


@pytest.mark.slow
def test_processes_that_plan_something_else_are_refused():
    first, second = planning(), planning(name="other.yaml", optimizer={"learning_rate": 0.02})
    with by_hand(first, [*second, "--measure=3"]) as processes:
        (code, output), *others = endings(processes)
    assert code == 2
    assert [line.partition(" differs")[0] for line in output.splitlines()] == ["jpipe: config", "what is planned"]
    assert others == [(2, "jpipe: process 1 ends; process 0 says why\n")]


def code_of_jpipe(patch):
    patch.setattr(team, "_digest_of_jpipe", lambda: "other")


def version_of_jaxlib(patch):
    real = importlib.metadata.version
    patch.setattr(importlib.metadata, "version", lambda name: "0.0.1" if name == "jaxlib" else real(name))


@contextlib.contextmanager
def jax_setting(name, value):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize(
    "difference",
    [
        lambda _: jax_setting("jax_log_compiles", True),
        lambda _: jax_setting("jax_compilation_cache_dir", "elsewhere"),
        lambda _: jax_setting("jax_dump_ir_to", "elsewhere"),
        lambda _: jax_setting("jax_cuda_visible_devices", "1"),
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_dump_to=elsewhere --xla_force_host_platform_device_count=2"),
    ],
)
def test_settings_that_change_no_number_may_differ_between_processes(difference, tiny, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    first = team.facts(changed(tiny))
    with difference(monkeypatch) or contextlib.nullcontext():
        assert team.facts(changed(tiny)) == first


def changed_code(patch):
    Path("own/parts.py").write_text("def model(): return 2")


@pytest.mark.parametrize(
    ("difference", "name"),
    [
        (code_of_jpipe, "code of jpipe"),
        (version_of_jaxlib, "version of jaxlib"),
        (changed_code, "code of own.parts"),
        (lambda _: jax.enable_x64(True), "jax_enable_x64"),
        (lambda _: jax.default_matmul_precision("float32"), "jax_default_matmul_precision"),
        (lambda _: jax.default_prng_impl("rbg"), "jax_default_prng_impl"),
        (lambda _: jax.threefry_partitionable(False), "jax_threefry_partitionable"),
        (lambda _: jax.numpy_dtype_promotion("standard"), "jax_numpy_dtype_promotion"),
        (lambda _: jax_setting("jax_random_seed_offset", 7), "jax_random_seed_offset"),
        (lambda _: jax_setting("jax_softmax_custom_jvp", True), "jax_softmax_custom_jvp"),
        (
            lambda _: jax_setting("jax_disable_most_optimizations", not jax.config.values["jax_disable_most_optimizations"]),
            "jax_disable_most_optimizations",
        ),
        (lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"), "XLA_FLAGS"),
        (lambda patch: patch.setenv("NVIDIA_TF32_OVERRIDE", "0"), "NVIDIA_TF32_OVERRIDE"),
        (lambda patch: patch.setenv("FLAX_FIX_RNG_SEPARATOR", "1"), "FLAX_FIX_RNG_SEPARATOR"),
    ],
)
def test_differences_between_processes_are_refused_and_named(difference, name, tiny, monkeypatch):
    Path("own").mkdir()
    Path("own/parts.py").write_text("def model(): return 1")
    config = changed(tiny | {"model": {"target": "own.parts:model"}})
    desk = Coordinator(2)
    desk.answer(0, {"meet": "agreement", "facts": team.facts(config)})
    with difference(monkeypatch) or contextlib.nullcontext():
        answer = desk.answer(1, {"meet": "agreement", "facts": team.facts(config)})
    (message,) = answer["differences"]
    assert message.startswith(f"{name} differs between processes 0 and 1: ")
    assert message.endswith(f"; start all processes with the same {name}")


class RecordingProcesses(Processes):
    """Process 0 of two, which only notes what it would have to agree with the other."""

    def __init__(self):
        self.index, self.count, self.facts = 0, 2, {}

    def waiting(self, what, on=None, limit=None):
        return contextlib.nullcontext()

    def agree(self, facts, limit=0.0):
        self.facts |= facts
        if "plan" in self.facts:
            raise InputError("enough")


class Pair(Processes):
    """One of two processes in threads of this one."""

    def __init__(self, index, shared):
        self.index, self.count, self._shared = index, 2, shared

    def agree(self, facts, limit=0.0):
        self._shared["facts"][self.index] = facts
        self.barrier("")
        differences = _differences(self._shared["facts"])
        self.barrier("")
        if differences:
            raise InputError(*differences)

    def barrier(self, name, limit=0.0):
        self._shared["barrier"].wait(LIMIT)

    def broadcast(self, name, data):
        self._shared["messages"][name] = data

    def receive(self, name, on=None, what=None):
        end = time.monotonic() + LIMIT
        while name not in self._shared["messages"] and time.monotonic() < end:
            time.sleep(0.01)
        return self._shared["messages"][name]

    def waiting(self, what, on=None, limit=None):
        return contextlib.nullcontext()


def in_both(work):
    """Return the result or the exception of `work(team)` for each of two processes, simulated by threads."""
    shared = {"facts": {}, "messages": {}, "barrier": threading.Barrier(2)}
    results = {}

    def run(index):
        try:
            results[index] = work(team.Team(Pair(index, shared)))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return results[0], results[1]


class PassedOn(InputError):
    """An error after which both processes continue."""


def test_all_processes_report_what_one_of_them_cannot_read():
    def work(one):
        def read():
            if one.index == 1:
                raise PassedOn("process-1/d: is missing")
            return "layers"

        return one.attempt("the layers", read, PassedOn), one.attempt("other layers", lambda: one.index, PassedOn)

    lost = None, "process-1/d: is missing"
    assert in_both(work) == ((lost, (0, "")), (lost, (1, "")))


def test_a_text_of_process_0_comes_to_all():
    text = "four © and 5 €"
    assert in_both(lambda one: (one.from_first("a text", lambda: text), one.from_first("another", str))) == ((text, ""), (text, ""))


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ENOENT, 2)])
def test_all_processes_end_with_the_code_of_the_one_that_fails(number, code):
    def work(one):
        def read():
            if one.index == 1:
                try:
                    raise OSError(number, os.strerror(number))
                except OSError as error:
                    raise InputError(f"data.path: {error.strerror}") from None

        return one.run_on_all(read)

    first, second = in_both(work)
    assert isinstance(first, team.ReportedElsewhere)
    assert first.code == code
    assert (str(second), code_of(second)) == (f"data.path: {os.strerror(number)}", code)


def test_the_plan_and_the_data_must_be_equal_in_all_processes(tiny, monkeypatch):
    noted = RecordingProcesses()

    @contextlib.contextmanager
    def joined(*_):
        yield team.Team(noted)

    monkeypatch.setattr(loop, "joined", joined)

    def ready(config, *_):
        plan = Plan.even("ab", num_stages=2, schedule="gpipe", microbatches=config.plan.microbatches)
        return types.SimpleNamespace(plan=plan), types.SimpleNamespace(digest=lambda: "of the text")

    monkeypatch.setattr(loop, "build_and_check", ready)
    monkeypatch.setattr(loop, "may_resume", lambda *_: False)
    monkeypatch.setattr(loop, "find_resumed", lambda *_, **__: None)
    monkeypatch.setattr(team.Team, "start_devices", lambda *_: None)
    all_facts = []
    for microbatches in 2, 4:
        noted.facts = {}
        with pytest.raises(InputError, match="enough"):
            loop.main(changed(tiny, plan={"microbatches": microbatches}))
        all_facts.append(noted.facts)
    assert [facts["data"] for facts in all_facts] == ["of the text"] * 2
    assert all_facts[0]["plan"] != all_facts[1]["plan"]


@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        (KeyboardInterrupt("interrupted; the steps are in run"), 130, "interrupted; the steps are in run\n"),
        (AssertionError("a slip of ours"), 1, "AssertionError: a slip of ours\n"),
        (InputError("seed: it is no number"), 2, "jpipe: seed: it is no number\n"),
        (RunStopped("the disk is full"), 1, "jpipe: the disk is full\n"),
        (PeerLost("process 1 crashed"), 1, "jpipe: process 1 crashed\n"),
    ],
)
def test_the_last_message_is_printed_before_jax_waits(reason, code, message, tiny, monkeypatch, capfd):
    Path("config.yaml").write_text(yaml.safe_dump(tiny))
    ended, outputs, codes = threading.Event(), [], []

    def main(*_):
        raise reason

    def stop():  # as long as JAX waits for others that hang
        outputs.append("".join(capfd.readouterr()))
        assert ended.wait(LIMIT)

    monkeypatch.setattr(distributed, "start", lambda *_: 2)
    monkeypatch.setattr(distributed, "stop", stop)
    monkeypatch.setattr(distributed, "leave_at_once", lambda code: None)
    monkeypatch.setattr(loop, "main", main)
    monkeypatch.setattr(distributed, "_joined", RecordingProcesses())
    monkeypatch.setattr(distributed, "_LEAVE", (0.01, 1000.0))
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    assert cli.main(["train", "config.yaml"]) == code
    assert outputs[0].endswith(message)
    assert codes == [code]
    assert capfd.readouterr() == ("", "")
