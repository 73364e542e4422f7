"""`jpipe train` and `jpipe simulate` report a mistake in the same way: one line, exit code 2, nothing written."""

import re
import sys

import jax
import pytest
import yaml

import jpipe
from jpipe import files
from jpipe_train import cli

OWN_PARTS = """
import jax.numpy as jnp

import jpipe


def nothing():
    pass


def layers():
    return {"in": jnp.tanh}


def fails(width=1):
    return jnp.ones(width) @ jnp.ones(3)


def squares(outputs, labels):
    return (outputs - 1.0) ** 2


def no_data(seed, batch_size):
    return [], []
"""
PLAN = jpipe.Plan.even(("embed", "block_0", "head"), 2, "gpipe", 2).to_json()
ORDER = "F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 I1.0 I1.1 W1.0 W1.1"  # each rank waits for the other
DEADLOCK = jpipe.Plan.even(("embed", "block_0", "head"), 2, "auto_zero_bubble", 2, order=ORDER).to_json()


@pytest.fixture(params=["train", "simulate"])
def refused(request, tiny, tmp_path, capsys, monkeypatch):
    """Run a command on a file of the folder made here, with overrides; it must be refused as said above. Gives the line."""
    jax.devices()  # as many as the tests have, before a command asks for more
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    real = files.read_bytes
    for method in ("init", "step", "drain", "evaluate"):
        monkeypatch.setattr(jpipe.Pipeline, method, lambda *_: pytest.fail("device work began"))

    def read_bytes(path, most):
        if "locked" in path.name:  # a superuser may read everything, so that no mode of a file would do
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, most)

    monkeypatch.setattr(files, "read_bytes", read_bytes)
    texts = {
        "tiny.yaml": yaml.safe_dump(tiny),
        "locked.yaml": "",
        "words.yaml": "just words",
        "broken.yaml": "train:\n  steps: [1, 2\n",
        "tab.yaml": "train:\n\tsteps: 3\n",
        "twice.yaml": "seed: 1\ntrain: {steps: 1, steps: 2}\n",
        "two.yaml": "seed: 1\n---\nseed: 2\n",
        "odd.yaml": "plan:\n  vertical_sync: yes\n",
        "deep.yaml": "[" * 60,
        "own_parts.py": OWN_PARTS,
        "locked.json": PLAN,
        "empty.json": "",
        "half.json": PLAN[: len(PLAN) // 2],
        "list.json": "[1]",
        "other.json": PLAN.replace("block_0", "block_O"),
        "layrs.json": PLAN[::-1].replace('"sreyal"', '"sryal"', 1)[::-1],
        "again.json": PLAN.replace('"replicas": 1', '"replicas": 1, "replicas": 2', 1),
        "deadlock.json": DEADLOCK,
        "number.json": PLAN.replace('"microbatches": 2', '"microbatches": 2.0'),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    for name in ("bytes.yaml", "bytes.json"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    before = sorted(tmp_path.rglob("*"))

    def refused(file: str, *words: str, lines: int = 1) -> str:
        code = cli.main([request.param, file, *words])
        line = capsys.readouterr().err
        assert code == 2
        assert line.startswith("jpipe: ")
        assert line.count("\n") == lines
        assert sorted(tmp_path.rglob("*")) == before
        return line

    yield refused
    sys.modules.pop("own_parts", None)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing.yaml", r"missing\.yaml: cannot read the config: No such file or directory; give a YAML file"),
        ("folder", r"folder: cannot read the config: Is a directory; give a YAML file"),
        ("locked.yaml", r"locked\.yaml: cannot read (the config|it): Permission denied; give a "),
        ("bytes.yaml", r"bytes\.yaml: expected (YAML )?text in UTF-8, found other bytes; is this a "),
        ("words.yaml", r"words\.yaml: expected a mapping of keys such as 'train:', found str"),
        ("broken.yaml", r"broken\.yaml, line 3, column 1: this YAML cannot be read: expected ',' or '\]'"),
        ("tab.yaml", r"tab\.yaml, line 2, column 1: this YAML cannot be read: found character '\\t'"),
        ("twice.yaml", r"twice\.yaml, line 2, column 19: this YAML cannot be read: the key 'steps' occurs twice"),
        ("two.yaml", r"two\.yaml, line 2, column 1: .* expected a single document in the stream, but found another document"),
        ("odd.yaml", r"odd\.yaml, line 2, column 18: .* 'yes' can be read in two ways; write true, false or a plain number, or"),
        ("deep.yaml", r"deep\.yaml, line 1, column 51: this YAML cannot be read: nested too deeply"),
    ],
)
def test_a_file_that_is_not_a_config(refused, file, message):
    assert re.match(f"jpipe: {message}", refused(file))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.scheduler=gpipe", r"tiny.yaml --set \S+: unknown key 'plan.scheduler'; did you mean 'plan.schedule'\?"),
        ("schedule=gpipe", r"tiny.yaml --set \S+: unknown key 'schedule'; did you mean 'plan.schedule'\?"),
        ("paln.schedule=gpipe", r"tiny.yaml --set \S+: unknown key 'paln'; did you mean 'plan'\?"),
        ("train.steps.most=3", r"--set \S+: 'train.steps' is a value, not a section; set the whole value, as train.steps=…"),
        ("train.steps", r"--set train.steps: expected key=value, such as train.steps=100, found no '='"),
        ("train.steps=many", r"tiny.yaml --set \S+: train.steps: expected a valid integer, found 'many'"),
        ("train.steps='3'", r"tiny.yaml --set \S+: train.steps: expected a valid integer, found '3'"),
        ("train.steps=3.0", r"tiny.yaml --set \S+: train.steps: expected a valid integer, found 3.0"),
        ("train.steps=true", r"tiny.yaml --set \S+: train.steps: expected a valid integer, found True"),
        ("train.steps=0", r"tiny.yaml --set \S+: train.steps: expected greater than or equal to 1, found 0"),
        ("train.steps=[1", r"--set train.steps=\[1, line 1, column 3: this YAML cannot be read: .*; put text with special"),
        ("plan.num_stages=9", r"plan: expected between 1 and 3 stages \(the number of layers\), found 9"),
        ("plan.file=missing.json", r"plan.file: cannot read 'missing.json': No such file or directory; give a plan's JSON file, or null"),
        ("plan.file=folder", r"plan.file: cannot read 'folder': Is a directory; give a plan's JSON file, or null"),
        ("plan.file=locked.json", r"plan.file: cannot read 'locked.json': Permission denied; give a plan's JSON file, or null"),
        ("plan.file=bytes.json", r"plan.file: expected a plan as JSON in 'bytes.json', found text that is not UTF-8"),
        ("plan.file=empty.json", r"empty.json: expected a plan as JSON, found text that is not JSON or is cut off at line 1, column 1 "),
        ("plan.file=half.json", r"half.json: expected a plan as JSON, found text that is not JSON or is cut off at line \d+, column \d+ "),
        ("plan.file=list.json", r"list.json: expected a JSON object with \"format\": \"jpipe-plan/1\", found 'list'; is this a plan of"),
        ("plan.file=other.json", r"other.json: layer 'block_0' of the model is in no stage; add it to a stage"),
        ("plan.file=layrs.json", r"layrs.json: unknown key 'stages.1.layrs'; did you mean 'stages.1.layers'\?"),
        ("plan.file=again.json", r"again.json: stages.0.replicas: expected a valid integer, found the key twice"),
        ("plan.file=number.json", r"number.json: microbatches: expected a valid integer, found 2.0"),
        ("data.path=missing.txt", r"data.path: 'missing.txt' does not exist; give a file, a folder or a glob"),
        ("data.path=folder", r"data.path: found no regular file at 'folder', so 0 bytes; give a file"),
        ("precision.params=bfloat", r"tiny.yaml --set \S+: precision: params: unknown dtype 'bfloat'; did you mean 'bfloat16'\?"),
        (
            "precision.loss_scale=fast",
            r"tiny.yaml --set \S+: precision: loss_scale: expected a finite number above 0, \"dynamic\", .*, found 'fast'; give",
        ),
        (
            "precision.accumulate=float64",
            r"precision: accumulate: float64 needs jax.config.update\('jax_enable_x64', True\) or JAX_ENABLE_X64=1; enable it, or",
        ),
        ("optimizer.name=adamm", r"tiny.yaml --set \S+: optimizer.name: unknown optimizer 'adamm'; did you mean 'adam'\?"),
        (
            "optimizer.arguments={beta: 0.5}",
            r"optimizer.arguments: 'adamw' has no argument 'beta'; its arguments, the most similar first: ",
        ),
        ("optimizer.arguments={b1: high}", r"optimizer.arguments: 'b1' of 'adamw': expected a number, found 'high'"),
        ("optimizer.clip_global_norm=0", r"tiny.yaml --set \S+: optimizer.clip_global_norm: expected greater than 0, found 0"),
        (
            "optimizer.delay_correction=predicted",
            r"tiny.yaml --set \S+: optimizer.delay_correction: expected predict, or a number of at least 0 such as 0.5, found 'predicted'",
        ),
        ("optimizer.delay_correction=-1", r"tiny.yaml --set \S+: optimizer.delay_correction: expected predict, or a number .*, found -1"),
        (
            "optimizer={delay_correction: predict, accumulate_batches: 2}",
            r"tiny.yaml --set .*: optimizer: delay_correction: expected no accumulate_batches with 'predict', found 2: the ",
        ),
        ("optimizer={name: sgd, delay_correction: 0.5}", r"optimizer: delay_correction needs momentum, found an optimizer that uses"),
        ("optimizer.clip_stage_norm=-1", r"tiny.yaml --set \S+: optimizer.clip_stage_norm: expected greater than 0, found -1"),
        (
            "optimizer={clip_global_norm: 1, clip_stage_norm: 2}",
            r"tiny.yaml --set .*: optimizer: clip_stage_norm: expected no clip_global_norm with 2\.0, found 1\.0: gradients are ",
        ),
        ("model={target: 'own_parts:layers'}", r"tiny.yaml --set .*: expected built-in parts only, found functions to import and "),
    ],
)
def test_an_override_that_does_not_fit(refused, override, message):
    assert re.match(f"jpipe: {message}", refused("tiny.yaml", "--set", override))


@pytest.mark.parametrize("override", ["optimizer.clip_global_norm=1", "optimizer.skip_nonfinite=true"])
def test_an_option_that_weight_stashing_does_not_support(refused, override):
    line = refused("tiny.yaml", "--set", "plan.schedule=pipedream", "--set", override)
    assert re.match(
        rf"jpipe: {override.split('=')[0]}: expected no early updates .*: the last stage updates before .*; use vertical_sync, ", line
    )


@pytest.mark.parametrize("override", ["plan.schedule=gpipe", "plan={file: other.json, schedule: gpipe}"])
def test_an_override_without_effect_because_of_a_plan_file(refused, override):
    message = f"jpipe: --set {override} has no effect with plan.file 'other.json'; remove this --set, or change the plan file\n"
    assert refused("tiny.yaml", "--set", override, *(() if "file" in override else ("--set", "plan.file=other.json"))) == message


def test_an_order_that_deadlocks(refused):
    grid = r"tick +\|.*\nrank 0 \| F0\.0 .*<<< waits for .*\nrank 1 \| .*<<< waits for what F of microbatch 1 at stage 1 needs\n"
    line = refused("tiny.yaml", "--set", "plan={file: deadlock.json}", lines=4)
    message = r"deadlock\.json: order: expected an order .*; the order deadlocks, ranks \[0, 1\] wait for each other; move .*"
    assert re.fullmatch(rf"jpipe: {message}\n{grid}", line)


def test_an_override_twice(refused):
    line = refused("tiny.yaml", "--set", "train.steps=2", "--set", "train.steps=3")
    assert line.startswith("jpipe: --set train.steps=3: expected each key once, found --set train.steps=… before, which would be lost")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model={target: 'nowhere:f'}", r"model.target: the module 'nowhere' of 'nowhere:f' is neither in the current folder "),
        ("model={target: 'own_parts:layer'}", r"model.target: the module 'own_parts' has no function 'layer'; did you mean 'layers'\?"),
        (
            "model={target: 'own_parts:nothing'}",
            r"model.target: expected 'own_parts:nothing' to return a model or a jpipe.LayerStack, found None; ",
        ),
        ("model={target: 'own_parts:layers'}", r"model.target: expected .* found a dict with keys in; wrap it in jpipe.LayerStack"),
        (
            "model={target: 'own_parts:fails'}",
            r"model.target: 'own_parts:fails' fails: TypeError: .* \(\S+own_parts.py:16\); fix it there",
        ),
        ("model={target: 'own_parts:fails', arguments: {widht: 2}}", r"model.arguments: 'own_parts:fails' has no argument 'widht'; its "),
        ("loss={target: 'own_parts:squares'}", r"loss: expected \(sum of the losses, weight\), two scalars, found float32\[2, 8, 256\]; "),
        ("data={target: 'own_parts:no_data'}", r"data.target: expected at least one validation batch from 'own_parts:no_data', found none"),
        ("optimizer={name: 'own_parts:nothing'}", r"optimizer.name: expected .* to return an optax.GradientTransformation, found NoneType"),
    ],
)
def test_users_code_that_does_not_fit(refused, override, message):
    assert re.match(f"jpipe: {message}", refused("tiny.yaml", "--allow-code", "--set", override))


def test_an_optimizer_that_cannot_be_split_over_stages(refused):
    assert re.match(
        r"jpipe: optimizer: it cannot be applied layer by layer, .*; instead: adamw with a learning-rate schedule",
        refused("tiny.yaml", "--set", "optimizer={name: contrib.prodigy}"),
    )


def test_a_config_in_place_of_a_plan(refused, capsys, request):
    if "train" in request.node.name:
        line = "jpipe: other.json: expected a config, found a plan; name it as plan.file in a config, or show it with jpipe simulate\n"
        assert refused("other.json") == line
    else:
        line = "jpipe: --set seed=1: expected a config, found the plan 'other.json'; edit the plan, or give a config\n"
        assert refused("other.json", "--set", "seed=1") == line
