"""The command line, as a person meets it: exit codes, one clear message for each mistake, no traceback, nothing left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import jpipe
from train import cli

pytestmark = pytest.mark.usefixtures("compiled_once")

ROOT = Path(__file__).parents[2]


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
    """Run `jpipe train` with overrides; it must be refused, before anything reaches a device. Gives the message."""

    def init(*_):
        raise AssertionError("device work began")

    monkeypatch.setattr(jpipe.Pipeline, "init", init)

    def refused(*overrides: str, **sections) -> str:
        code = cli.main(["train", write_config(**sections), *(word for override in overrides for word in ("--set", override))])
        message = capsys.readouterr().err
        assert code == 2
        assert "Traceback" not in message
        assert message.startswith("jpipe: ")
        assert message.count("\n") == 1
        assert not (Path(tiny["run"]["dir"]) / "plan.json").exists()
        return message

    return refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.scheduler=gpipe", r"tiny.yaml --set plan.scheduler=gpipe: unknown key 'plan.scheduler'; did you mean 'schedule'\?"),
        ("train.steps=many", r"tiny.yaml --set train.steps=many: train.steps: expected a valid integer, found 'many'"),
        ("plan.schedule=gpipee", r"tiny.yaml --set plan.schedule=gpipee: plan.schedule: unknown schedule 'gpipee'; did you mean 'gpipe'\?"),
        ("plan.num_stages=9", r"expected between 1 and 3 stages \(the number of layers\), found 9"),
        ("plan.microbatches=1", r"pipedream_2bw.* 2 .*found 1|microbatches"),
        ("plan.microbatches=3", r"train.batch_size 4 is not divisible by plan.microbatches 3; change one of them"),
        (
            "plan.recompute=ful",
            r"tiny.yaml --set plan.recompute=ful: plan.recompute: unknown recomputation policy 'ful'; did you mean 'full'\?",
        ),
        ("plan.recompute=[full]", r"one recomputation policy for all or one for each of 2 stages, found 1"),
        ("plan.vertical_sync=true", r"vertical_sync is an option of the schedule 'pipedream'"),
        ("plan.file=missing.json", r"plan.file: cannot read 'missing.json': No such file or directory"),
        ("data.path=missing.txt", r"data.path: 'missing.txt' does not exist; give a file, a folder or a glob"),
        ("data.path=/dev/null", r"data.path: found no regular file at '/dev/null', so 0 bytes"),
        ("model.seq_len=800", r"data.path: expected at least 3201 bytes for training .* found 3600 and 900"),
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
            r"plan.json: expected a plan as JSON, found text that is none or is cut off at line \d+, column \d+",
        ),
        (lambda plan: '{"a": 1}', r"plan.json: .*is this a plan of jpipe\?"),
        (lambda plan: plan.replace('"block_0"', '"embed"'), r"plan.json: layer 'embed' is in stage 0 and again"),
        (lambda plan: plan.replace('"head"', '"tail"'), r"layer 'head' of the model is in no stage|layer 'tail' is not in the model"),
        (lambda plan: plan.replace('"embed",', ""), r"layer 'embed' of the model is in no stage"),
        (lambda plan: plan.replace('"microbatches": 2', '"microbatches": 3'), r"4 .*divisible by 3|divisible by 3 microbatches, found 4"),
    ],
    ids=["truncated", "foreign", "layer twice", "layer unknown", "layer missing", "batch not divisible"],
)
def test_a_bad_plan_file_is_refused(refused, tmp_path, spoil, message):
    plan = jpipe.Plan.even(("embed", "block_0", "head"), 2, "gpipe", 2)
    (tmp_path / "plan.json").write_text(spoil(plan.to_json()))
    assert re.search(message, refused(f"plan.file={tmp_path / 'plan.json'}"))


def test_layers_that_do_not_fit_are_named_with_their_shapes(refused, monkeypatch):
    real = cli_stack()
    stack = {"embed": real.layers["embed"], "flat": lambda x: x[:, :, 0], "head": real.layers["head"]}
    monkeypatch.setattr("train.gpt.gpt", lambda config: jpipe.LayerStack(stack))
    message = refused()
    assert "'flat'" in message
    assert "'head'" in message
    assert "[2, 8]" in message


def cli_stack() -> jpipe.LayerStack:
    from train import gpt
    from train.config import ModelConfig

    return gpt.gpt(ModelConfig(depth=1, width=8, heads=2, seq_len=8))


def test_a_folder_with_another_run_is_refused_and_left_alone(write_config, tiny, capsys):
    config = write_config(train={"steps": 1})
    assert cli.main(["train", config]) == 0
    before = {file.name: file.read_bytes() for file in Path(tiny["run"]["dir"]).iterdir()}
    assert cli.main(["train", config]) == 2
    assert (
        f"run.dir: expected a new or empty folder, found another run in '{tiny['run']['dir']}'; choose another" in capsys.readouterr().err
    )
    assert {file.name: file.read_bytes() for file in Path(tiny["run"]["dir"]).iterdir()} == before


def test_a_loss_that_is_not_finite_exits_with_1(write_config, tiny, capsys):
    config = write_config(optimizer={"name": "sgd", "learning_rate": 1e30}, train={"steps": 50})
    assert cli.main(["train", config]) == 1
    message = capsys.readouterr().err
    assert re.fullmatch(r"jpipe: step \d+: the (validation )?loss is (nan|inf); .*the steps before are in .*\n", message)
    assert (Path(tiny["run"]["dir"]) / "metrics.jsonl").read_text().startswith('{"step": 0')


@pytest.mark.parametrize("arguments", [[], ["trian", "x"], ["train"], ["train", "x", "--sett", "a=1"]])
def test_a_wrong_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    assert "train" in capsys.readouterr().out


# A job in the background ignores SIGINT, and its children inherit that: these have to hear it however the tests were started.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from train import cli
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


@pytest.mark.newest
def test_a_fresh_process_makes_its_own_devices(write_config, tiny):
    with jpipe_process("train", write_config(train={"steps": 2})) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1].startswith("2 steps in ")
