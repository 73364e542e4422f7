"""The command line: exit codes, one clear message for each mistake, no traceback, nothing left behind."""

import contextlib
import gc
import io
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
import yaml

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import layers
from jpipe_train import cli
from jpipe_train.checkpoint import run_folder

ROOT = Path(__file__).parents[2]
COMPILATIONS, COMPILED_BY_OPTAX = [], []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILATIONS.append(event) if "backend_compile" in event else None
)


@pytest.fixture
def write_config(tmp_path, tiny):
    """Write the tiny config, with some sections or keys replaced, and give its path."""

    def write(**sections) -> str:
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(tiny | {name: tiny.get(name, {}) | keys for name, keys in sections.items()}))
        return str(path)

    return write


@pytest.fixture
def refused(write_config, tiny, capsys, monkeypatch):
    """Run `jpipe train` with overrides; it must be refused before a program is compiled, an array or the folder made. Gives the message."""

    def device_work(*_):
        raise AssertionError("device work began")

    for method in ("init", "step", "drain", "evaluate"):
        monkeypatch.setattr(jpipe.Pipeline, method, device_work)

    def refused(*overrides: str, **sections) -> str:
        if not COMPILED_BY_OPTAX:  # what some optimizers compile when they are tried on tiny arrays
            cli.main(["train", write_config(), "--set", "run.dir=/dev/null"])
            capsys.readouterr()
            COMPILED_BY_OPTAX.append(True)
        arrays, compilations = jax.live_arrays(), len(COMPILATIONS)
        code = cli.main(["train", write_config(**sections), *(word for override in overrides for word in ("--set", override))])
        message = capsys.readouterr().err
        assert code == 2
        assert "Traceback" not in message
        assert message.startswith("jpipe: ")
        assert message.count("\n") == 1 or "\nworkers:\n" in message  # a picture of what does not fit
        assert not Path(tiny["run"]["dir"]).exists()
        assert len(COMPILATIONS) == compilations
        assert {id(array) for array in jax.live_arrays()} <= {id(array) for array in arrays}
        return message

    return refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.scheduler=gpipe", r"tiny.yaml --set plan.scheduler=gpipe: unknown key 'plan.scheduler'; did you mean 'plan.schedule'\?"),
        ("train.steps=many", r"tiny.yaml --set train.steps=many: train.steps: expected a valid integer, found 'many'"),
        ("plan.schedule=gpipee", r"tiny.yaml --set plan.schedule=gpipee: plan.schedule: unknown schedule 'gpipee'; did you mean 'gpipe'\?"),
        ("plan.num_stages=9", r"jpipe: plan: expected between 1 and 3 stages \(the number of layers\), found 9"),
        (
            "plan.microbatches=1",
            r"jpipe: plan: the schedule 'pipedream_2bw' needs at least 2 microbatches for 2 stages, found microbatches 1; raise",
        ),
        ("plan.microbatches=3", r"train.batch_size 4 is not divisible by plan.microbatches 3; change one of them"),
        (
            "plan.recompute=ful",
            r"tiny.yaml --set plan.recompute=ful: plan.recompute: unknown recomputation policy 'ful'; did you mean 'full'\?",
        ),
        ("plan.recompute=[full]", r"one recomputation policy for all stages or one for each of 2 stages, found a list of 1"),
        ("plan.vertical_sync=true", r"vertical_sync: this is an option of the schedule 'pipedream'"),
        ("plan.replicas=0", r"plan.replicas: expected a number from 1 to 1024 or a list of them, one for each stage, found 0"),
        (
            "plan.replicas=[1, x]",
            r"plan.replicas: expected a number from 1 to 1024 or a list of them, one for each stage, found \[1, 'x'\]",
        ),
        ("plan.replicas=true", r"plan.replicas: expected a number from 1 to 1024 or a list of them, one for each stage, found True"),
        ("plan.replicas=[1, 1, 1]", r"plan: expected one number of replicas for all stages or one for each of 2 stages, found a list of 3"),
        (
            "plan.replicas=4",
            r"jpipe: plan.microbatches: expected a multiple of 4, so that the replicas of each stage, \[4, 4\], share the microbatches "
            r"evenly, found 2; use 4",
        ),
        (
            "plan.mesh=2",
            r"plan.mesh: expected axes and sizes, such as {data: 2, model: 4}, or a list of them, .*, found 2; {} is one device",
        ),
        ("plan.mesh={tensor: 2}", r"plan: stages.0.mesh: expected axes that the rules name, 'data', 'expert', 'model', found 'tensor'"),
        (
            "plan.mesh={model: 3}",
            r"jpipe: model.heads: expected a multiple of 3, the size of the axis 'model' of the mesh of stage 0, found 2",
        ),
        ("plan.mesh={data: 3}", r"batch: expected a multiple of 3 rows in a microbatch, .* found 2; change"),
        ("plan.rules={mlp: model}", r"jpipe: plan.rules.mlp: expected an axis of the stages' meshes, no mesh, found 'model'"),
        ("plan.param_axes={a/*: [mlp]}", r"jpipe: plan.param_axes: 'a/\*' matches no parameter of the model"),
        ("plan.shard_optimizer=true", r"jpipe: plan.shard_optimizer: expected a stage with replicas, found none"),
        ("plan.agree={every: 2}", r"jpipe: plan.agree: expected the same number of replicas for each stage, 2 or more, .*, found \[1, 1\]"),
        ("plan.agree={every: 0}", r"plan.agree.every: expected greater than or equal to 1, found 0"),
        ("plan.offload={optimizer: [7]}", r"plan.offload.optimizer: expected stages from 0 to \d, or 'all', found 7"),
        ("plan.links={activations: int4}", r"plan.links.activations: expected 'bfloat16', 'int8' or 'fp8', found 'int4'"),
        ("plan.update_every=never", r"plan.update_every: expected 'batch' or 'replicas', found 'never'"),
        (
            "plan.max_delay=0.5",
            r"jpipe: plan.max_delay: expected a plan with a mean delay of at most 0.5 updates, found pipedream_2bw with 1; ",
        ),
        (
            "plan.noam=true",
            r"tiny.yaml --set plan.noam=true: plan: the option noam no longer exists, found True; remove it: schedules already keep",
        ),
        (
            "plan={schedule: gpipe, num_stages: 2, microbatches: 2, flush_first: 2}",
            r"jpipe: plan.flush_first: this is an option of the schedules 'pipedream', 'pipedream_2bw', found schedule 'gpipe'; remove the "
            r"option",
        ),
        ("plan.file=missing.json", r"plan.file: cannot read 'missing.json': No such file or directory"),
        ("data.path=missing.txt", r"data.path: 'missing.txt' does not exist; give a file, a folder or a glob"),
        ("data.path=/dev/null", r"data.path: found no regular file at '/dev/null', so 0 bytes"),
        ("data.validation_fraction=1e-9", r"data.path: expected at least 2 bytes for training .* found 4500 and 0"),
        ("data.path=" + "a" * 400, r"jpipe: data.path: cannot find 'a{400}': File name too long; choose another\n"),
        ("run.dir=" + "a" * 400, r"jpipe: run.dir: cannot find 'a{400}': File name too long; choose another\n"),
        ("data.path=" + "a/" * 2500, r"jpipe: data.path: cannot find 'a/.*…/a.*': File name too long; choose another\n"),
        (
            "run.dir=gs://bucket/x",
            r"run.dir: expected a path on this machine, found the URL 'gs://bucket/x'; copy what is there to a folder",
        ),
        ("run.dir=~nosuchuser/x", r"run.dir: '~nosuchuser/x' begins with an unknown user's home folder; give the full path\n"),
        ("optimizer.warmup_steps=10000000000", r"optimizer.warmup_steps: expected less than or equal to 1000000000, found 10000000000\n"),
        ("model.width=4000000", r"model.width: expected less than or equal to 1000000, found 4000000\n"),
        (
            "model.width=900000",
            r"jpipe: model: expected a model that fits into [\d,]+ GB, the memory of all devices, found a model that needs more than "
            r"155,\d\d\d GB \(38,\d\d\d GB of weights, their gradients, the optimizer's state\); make it smaller\n",
        ),
        ("optimizer.ema_decay=1", r"optimizer.ema_decay: expected less than 1, found 1"),
        (
            "optimizer.accumulate_batches=10",
            r"optimizer.accumulate_batches 10 is more than train.steps 5, so there would be no update",
        ),
        ("seed=!!bool foo", r"jpipe: --set seed=!!bool foo, line 1, column 1: .* expected a plain value, found a tag \(!\); put text"),
        ("model.heads=3", r"width 8 is not divisible by heads 3"),
        ("run.dir=/dev/null", r"run.dir: expected a folder, found the file '/dev/null'"),
        ("run.dir=/proc/run", r"run.dir: cannot write '/proc/run': "),
    ],
)
def test_bad_input_is_refused_with_one_clear_message(refused, override, message):
    assert re.search(message, refused(override))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda plan: plan[: len(plan) // 2],
            r"plan.json: expected a plan as JSON, found text that is not JSON or is cut off at line \d+, column \d+",
        ),
        (lambda plan: '{"a": 1}', r"plan.json: .*is this a plan of jpipe\?"),
        (lambda plan: plan.replace('"block_0"', '"embed"'), r"plan.json: layer 'embed' is in stage 0 and again"),
        (
            lambda plan: plan.replace('"head"', '"tail"'),
            r"jpipe: \S*/plan.json: layer 'head' of the model is in no stage; add it to a stage\n",
        ),
        (
            lambda plan: plan.replace('"head"', '"head", "tail"'),
            r"jpipe: \S*/plan.json: layer 'tail' is not in the model; known: block_0, embed, head\n",
        ),
        (
            lambda plan: plan.replace('"embed",', ""),
            r"jpipe: \S*/plan.json: layer 'embed' of the model is in no stage; add it to a stage\n",
        ),
        (
            lambda plan: plan.replace('"microbatches": 2', '"microbatches": 3'),
            r"jpipe: \S*/plan.json: expected microbatches that divide train.batch_size 4, found 3; change one of them\n",
        ),
        (
            lambda plan: plan.replace('"replicas": 1', '"replicas": 3'),
            r"jpipe: \S*/plan.json: microbatches: expected a multiple of 3, so that the replicas of each stage, \[3, 3\], share the "
            r"microbatches evenly, found 2; use 3, or",
        ),
        (
            lambda plan: plan.replace('"placement": null', '"placement": [[0], [100000]]'),
            r"jpipe: \S*/plan.json: placement: it names device 100000, but there are only 8 \(0 to 7\); choose one of these\n"
            r"workers:\n  stage 0: w0\n",
        ),
    ],
    ids=[
        "truncated",
        "foreign",
        "layer twice",
        "layer renamed",
        "layer unknown",
        "layer missing",
        "batch not divisible",
        "replicas",
        "placement",
    ],
)
def test_a_bad_plan_file_is_refused(refused, tmp_path, spoil, message):
    plan = jpipe.Plan.even(("embed", "block_0", "head"), 2, "gpipe", 2)
    (tmp_path / "plan.json").write_text(spoil(plan.to_json()))
    assert re.search(message, refused(f"plan.file={tmp_path / 'plan.json'}"))


@pytest.mark.parametrize(
    ("slices", "message"),
    [("[4, 3]", "plan.slices: expected rows of 7 positions, found 8"), ("9", "rows of at least 9 positions, found 8")],
)
def test_slices_that_do_not_fit_are_refused_before_there_is_a_folder(refused, slices, message):
    assert message in refused("plan.schedule=gpipe", f"plan.slices={slices}")


def test_layers_that_do_not_fit_are_named_with_their_shapes(refused, monkeypatch):
    real = layers.layers(ModelConfig(depth=1, width=8, heads=2, seq_len=8))
    stack = {"embed": real.layers["embed"], "flat": lambda x: x[:, :, :4], "head": real.layers["head"]}
    monkeypatch.setattr("jpipe_lm.models.layers.layers", lambda config, chunk, tune: jpipe.LayerStack(stack))
    message = refused()
    assert "'flat'" in message
    assert "'head'" in message
    assert "[2, 8, 4]" in message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Unknown backend cuda\nmore"), "Unknown backend cuda"),
        (AssertionError(), "none found for '{}'"),
    ],
)
def test_missing_devices_are_refused(error, reason, refused, monkeypatch):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    reason = reason.format(jax.config.values["jax_platforms"])
    assert refused() == f"jpipe: JAX has no devices to use: {reason}; check the environment variable JAX_PLATFORMS\n"


def test_a_file_where_the_runs_belong_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    message = "jpipe: run.dir: expected a folder 'runs' for the runs, found a file; move it away, or choose a folder\n"
    assert refused("run.dir=null") == message


def test_output_in_an_encoding_without_our_characters_is_replaced(write_config, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(["train", write_config(train={"steps": 1})]) == 0
    stdout.flush()
    lines = stdout.buffer.getvalue().decode("ascii").splitlines()
    assert lines[0] == "reading the data ?"
    assert re.match(r"1 step in \d+ s: validation loss \d\.\d+ \? \d\.\d+ nats per byte", lines[-1])


def test_a_folder_with_another_run_is_refused_and_left_alone(write_config, tiny, capsys):
    config = write_config(train={"steps": 1})
    assert cli.main(["train", config]) == 0
    assert COMPILATIONS  # so that `refused` would notice
    before = {file: file.read_bytes() for file in Path(tiny["run"]["dir"]).rglob("*") if file.is_file()}
    assert cli.main(["train", config]) == 2
    assert (
        f"run.dir: expected a new or empty folder, found another run in '{tiny['run']['dir']}'; choose another" in capsys.readouterr().err
    )
    assert {file: file.read_bytes() for file in Path(tiny["run"]["dir"]).rglob("*") if file.is_file()} == before


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("learning_rate", [1e30, 1e300])
def test_a_loss_that_is_not_finite_exits_with_1(write_config, tiny, capsys, learning_rate):
    config = write_config(optimizer={"name": "sgd", "learning_rate": learning_rate}, train={"steps": 50})
    assert cli.main(["train", config]) == 1
    message = capsys.readouterr().err
    assert re.fullmatch(r"jpipe: step \d+: the (validation )?loss is (nan|inf); .*the steps logged so far are in .*\n", message)
    assert (Path(tiny["run"]["dir"]) / "metrics.jsonl").read_text().startswith('{"step": 0')


@pytest.mark.parametrize("arguments", [[], ["trian", "x"], ["train"], ["train", "x", "--sett", "a=1"]])
def test_a_wrong_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_begins_with_the_three_commands_that_most_people_need(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    introduction, bullet, lists = capsys.readouterr().out.partition("•")
    assert re.findall(r"jpipe (\w+) (?:CONFIG|RUN FILE) +[a-z]", introduction) == ["train", "plan", "export"]
    assert re.findall(r"• (\S+)", bullet + lists)[:3] == ["train", "plan", "export"]
    assert "jpipe --version" in introduction


def test_the_usage_of_launch_has_the_order_of_the_command_line(capsys):
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"])
    usage = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    assert usage.index("OPTIONS]") < usage.index("-- train CONFIG")


def test_the_version_is_printed_without_jax():
    program = "import sys; from jpipe_train import cli; code = cli.main(['--version']); sys.exit(code or 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jpipe {jpipe.__version__}\n", "")


HOSTILE = "x\x1b[31m\x07\ny\x9b2J"


@pytest.mark.parametrize("steps", [3, 50], ids=["done", "diverged"])
def test_no_foreign_name_controls_the_terminal(write_config, tmp_path, capsys, steps):
    rate = {"name": "sgd", "learning_rate": 1e30} if steps == 50 else {}
    config = write_config(run={"dir": str(tmp_path / HOSTILE)}, train={"steps": steps}, optimizer=rate)
    assert cli.main(["train", config]) == (1 if rate else 0)
    out, err = capsys.readouterr()
    assert set(out + err) - {"\n"} == {c for c in out + err if c.isprintable()}
    assert r"x\x1b[31m\x07\ny\x9b2J" in (err if rate else out.splitlines()[-1])


# A job in the background ignores SIGINT, and its children inherit that: these have to hear it however the tests were started.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jpipe_train import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def jpipe_process(*arguments: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_with_a_readable_folder(write_config, tiny):
    with jpipe_process("train", write_config(train={"steps": 1_000_000, "eval_every": 1_000_000})) as process:
        for line in process.stdout:
            if line.startswith("step 0 "):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    assert "interrupted; the steps logged so far are in" in out
    folder = Path(tiny["run"]["dir"])
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps)))
    assert steps
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["steps"] == 1_000_000
    jpipe.Plan.from_json((folder / "plan.json").read_text())


def press(*_, **__):
    signal.raise_signal(signal.SIGINT)


def press_where_python_drops_it():
    """Press Ctrl-C inside a callback of Python's garbage collection, which drops exceptions; JAX has one."""
    gc.callbacks.append(press_once := lambda *_: gc.callbacks.remove(press_once) or press())
    gc.collect()


def press_where_it_is_replaced():
    """Press Ctrl-C where the exception is replaced by another, as C code may do."""
    try:
        press()
    except KeyboardInterrupt:
        raise RuntimeError("something else") from None


@pytest.mark.thinned(most=4)
@pytest.mark.parametrize("way", [press, press_where_python_drops_it, press_where_it_is_replaced])
@pytest.mark.parametrize("moment", ["jpipe_train.data.data.load", "jpipe.Pipeline.check", "jpipe.Pipeline.init", "jpipe.Pipeline.evaluate"])
def test_ctrl_c_is_handled_at_every_moment(write_config, tiny, capsys, monkeypatch, interruptible, moment, way):
    real, ways = pkgutil.resolve_name(moment), [way]  # once: a second Ctrl-C ends the process
    monkeypatch.setattr(moment, lambda *arguments, **options: (ways and ways.pop()(), real(*arguments, **options))[1])
    assert cli.main(["train", write_config()]) == 130
    out, err = capsys.readouterr()
    assert err == ""
    folder = Path(tiny["run"]["dir"])
    began = moment in ("jpipe.Pipeline.init", "jpipe.Pipeline.evaluate")
    none = "the run writes no checkpoints to resume from (checkpoint.every)"
    message = f"interrupted; the steps logged so far are in {folder}; {none}" if began else "interrupted before the run began"
    assert out.splitlines()[-1] == message
    assert out.count("interrupted") == 1
    assert folder.exists() == began


def test_ctrl_c_leaves_no_half_made_folder(write_config, tiny, capsys, monkeypatch, interruptible):
    real = run_folder.write_atomically
    monkeypatch.setattr(run_folder, "write_atomically", lambda *arguments: (path_is_config(*arguments) and press(), real(*arguments)))
    assert cli.main(["train", write_config()]) == 130
    assert f"interrupted; the steps logged so far are in {tiny['run']['dir']}" in capsys.readouterr().out
    assert {"config.yaml", "plan.json", "metrics.jsonl"} <= {file.name for file in Path(tiny["run"]["dir"]).iterdir()}


def path_is_config(path: Path, text: str) -> bool:
    return path.name == "config.yaml"


def test_a_lost_ctrl_c_stops_the_next_step(write_config, tiny, capsys, monkeypatch, interruptible):
    real, steps = jpipe.Pipeline.step, []

    def step(*arguments, **options):
        steps.append(len(steps))
        if steps[-1] == 2:
            press_where_python_drops_it()
        return real(*arguments, **options)

    monkeypatch.setattr(jpipe.Pipeline, "step", step)
    assert cli.main(["train", write_config()]) == 130
    assert steps == [0, 1, 2]
    rows = (Path(tiny["run"]["dir"]) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(len(rows)))
    assert capsys.readouterr().err == ""


def test_a_foreign_ctrl_c_handler_is_left_unchanged(write_config, capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a job in the background
    try:
        assert cli.main(["train", write_config(), "--set", "seed=x"]) == 2
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cli.main, ["train", write_config(), "--set", "seed=x"]).result() == 2


PROGRAM_PRESSING_AT_AN_IMPORT = """
import builtins, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jpipe_train import cli
real, awaited = builtins.__import__, {sys.argv.pop(1)}
def press(name, *rest, **more):
    if name in awaited:
        awaited.clear()
        signal.raise_signal(signal.SIGINT)
    return real(name, *rest, **more)
builtins.__import__ = press
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("module", ["tyro", "jax", "grain"])
def test_ctrl_c_during_imports_ends_cleanly(write_config, module):
    command = [sys.executable, "-c", PROGRAM_PRESSING_AT_AN_IMPORT, module, "train", write_config()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted before the run began\n", "")


@pytest.mark.exhaustive
def test_a_fresh_process_makes_its_own_devices(write_config, tiny):
    with jpipe_process("train", write_config(train={"steps": 2})) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1].startswith("2 steps in ")
