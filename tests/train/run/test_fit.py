"""`jpipe_train.fit` trains as `jpipe train` does, resumes exactly, stops when a callback says so, and refuses what cannot be resumed."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
import jpipe.checkpoints
import jpipe_train
from examples import mlp
from jpipe_train import cli
from jpipe_train.checkpoint.best import best_step
from jpipe_train.data.arrays.array_rows import RowsOfArrays
from jpipe_train.losses import cross_entropy
from jpipe_train.run import fit_data, loop
from jpipe_train.run.callbacks import Callbacks
from tests.jpipe.running import check_equal
from tests.packages import ROOT
from tests.train.checkpoint.test_resume import weights_of
from tests.train.conftest import changed
from tests.train.run.fit_program import ARRAYS, X, pipeline, squares
from tests.train.run.test_loop import rows_of

pytestmark = pytest.mark.usefixtures("no_report", "nothing_in_the_way")
LIMIT = 120  # seconds, for what takes ten
BATCHES = [(X[i : i + 8], ARRAYS[1][i : i + 8]) for i in range(12)]
QUIET = {"progress": False, "log": ()}


@pytest.fixture
def nothing_in_the_way(tmp_path, monkeypatch):
    """Change to an empty folder, and check that signals have their usual handlers at the end."""
    monkeypatch.chdir(tmp_path)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def losses_of(pipe, data, **arguments) -> tuple[list[float], jpipe_train.FitResult]:
    """Return the loss of each step, and the result."""
    losses = []
    result = jpipe_train.fit(
        pipe, data, **{**QUIET, **arguments}, callbacks=[SimpleNamespace(on_step=lambda record: losses.append(record.loss))]
    )
    return losses, result


def test_a_loss_that_is_not_finite_before_any_update_names_the_rows_that_are_not():
    rows, targets = X.copy(), ARRAYS[1].copy()
    rows[5, 1], targets[3, 0] = np.nan, np.inf
    data = [(rows[i : i + 8], targets[i : i + 8]) for i in (0, 8)]
    words = (
        "step 0: the loss is .* before any update; look for .*; in the first batch, row 5 of inputs and row 3 of targets has such values"
    )
    with pytest.raises(loop.NonFiniteLoss, match=words):
        jpipe_train.fit(pipeline(), data, steps=2, **QUIET)


@pytest.mark.slow
def test_a_run_from_python_equals_that_of_the_command_line(tmp_path):
    fields = {
        "model": {"target": "examples.mlp:model", "arguments": {"width": 8, "depth": 2}},
        "data": {"target": "examples.mlp:data"},
        "train": {"steps": 6, "batch_size": 8, "eval_every": 3},
        "plan": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 2},
        "optimizer": {"name": "adam", "learning_rate": 3e-3},
        "eval": {"metrics": {"accuracy": "accuracy"}},
        "checkpoint": {"every": 4},
        "seed": 5,
    }
    expected = loop.main(changed(fields, run={"dir": str(tmp_path / "cli")}))
    stack, (train, validation) = mlp.model(8, 2), mlp.data(5, 8)
    pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, "pipedream_2bw", 2), cross_entropy.loss, optax.adam(3e-3))
    evaluation = {"eval_data": validation, "eval_every": 3, "metrics": {"accuracy": "accuracy"}}
    result = jpipe_train.fit(pipe, train, steps=6, **evaluation, checkpoint=4, seed=5, run_dir=tmp_path / "fit", **QUIET)
    rows = [{name: value for name, value in row.items() if name != "learning_rate"} for row in rows_of(tmp_path / "cli")]
    assert rows_of(tmp_path / "fit") == rows
    assert "val_accuracy" in rows[3]
    assert (result.summary.val_loss_before, result.summary.val_loss_after) == (expected.val_loss_before, expected.val_loss_after)
    check_equal(weights_of(tmp_path / "fit"), weights_of(tmp_path / "cli"))
    assert (tmp_path / "fit" / "plan.json").read_text() == (tmp_path / "cli" / "plan.json").read_text()
    assert repr(result).startswith("FitResult(steps=6, val_loss_before=1.")
    assert result.summary.measured.timeline  # which is not in its text
    assert len(repr(result.summary)) < 500


def test_a_second_call_with_the_same_pipeline_compiles_nothing(nothing_shared):
    compiled = []

    def listen(event, seconds, **_):
        compiled.extend([event] if event.endswith("backend_compile_duration") else [])

    pipe, arguments = pipeline(), {"steps": 3, "batch_size": 8, "eval_data": ARRAYS, "metrics": {"correlation": "pearson"}}
    first, _ = losses_of(pipe, ARRAYS, **arguments)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        again, _ = losses_of(pipe, ARRAYS, **arguments)
        assert (again, compiled) == (first, [])
        with jax.default_matmul_precision("float32"):  # compiles other programs
            losses_of(pipe, ARRAYS, **arguments)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_run_without_a_folder_writes_nothing_and_returns_the_trained_state(tmp_path):
    pipe = pipeline()
    sizes = {"steps": np.int64(30), "batch_size": np.int32(8), "eval_every": np.int64(50), "log_every": np.uint8(1), "seed": np.int64(0)}
    losses, result = losses_of(pipe, ARRAYS, **sizes, eval_data=ARRAYS)
    assert not list(tmp_path.iterdir())
    assert result.folder is None
    assert len(losses) == 30
    assert result.summary.val_loss_after < result.summary.val_loss_before
    outputs = pipe.predict(result.state, X)
    assert float(((outputs - ARRAYS[1]) ** 2).mean()) == pytest.approx(result.summary.val_loss_after, rel=1e-5)  # of all 20 rows, each once


@pytest.mark.slow
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(tmp_path):
    arguments = {"batch_size": 8, "eval_data": ARRAYS, "eval_every": 3, "checkpoint": 3}
    whole, result = losses_of(pipeline(), ARRAYS, steps=8, run_dir=tmp_path / "whole", **arguments)
    losses_of(pipeline(), ARRAYS, steps=4, run_dir=tmp_path / "parts", **arguments)
    later, resumed = losses_of(pipeline(), ARRAYS, steps=8, run_dir=tmp_path / "parts", **arguments)
    assert later == whole[4:]
    assert resumed.summary.val_loss_before == result.summary.val_loss_before
    check_equal(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    pipe = pipeline()
    again, complete = losses_of(pipe, ARRAYS, steps=8, run_dir=tmp_path / "parts", **arguments)
    assert (again, complete.folder) == ([], tmp_path / "parts")
    np.testing.assert_array_equal(pipe.predict(complete.state, X), pipe.predict(result.state, X))


def test_epochs_are_the_steps_that_have_all_their_rows(tmp_path):
    """30 rows of 20 are four batches of eight; the fifth batch of a list of four is its first one again."""
    assert fit_data.load(ARRAYS, None, 8, 0, None, 1.5)[0].steps == 4
    data, _ = fit_data.load(BATCHES[:4], None, None, 0, None, 1.25)
    assert data.steps == 5
    np.testing.assert_array_equal(data.train[4][0][:], BATCHES[0][0])
    for losses in (2, 0):  # the second call finds nothing left to train
        found, result = losses_of(pipeline(), ARRAYS, epochs=0.5, batch_size=8, run_dir=tmp_path / "run")
        assert (len(found), result.summary.steps) == (losses, 2)


@pytest.mark.slow
def test_a_run_in_epochs_resumes_with_more_of_them(tmp_path):
    whole, _ = losses_of(pipeline(), ARRAYS, steps=8, batch_size=8)
    arguments = {"run_dir": tmp_path / "run"}
    first, _ = losses_of(pipeline(), ARRAYS, epochs=2, batch_size=8, **arguments)
    second, result = losses_of(pipeline(), ARRAYS, epochs=3, batch_size=8, **arguments)
    assert first + second == whole
    assert (len(first), result.summary.steps) == (5, 8)
    _, result = losses_of(pipeline(), ARRAYS, epochs=4, batch_size=4, **arguments)  # 16 rows are left
    assert result.summary.steps == 12


@pytest.mark.slow
def test_a_run_goes_on_from_a_state(tmp_path):
    whole, _ = losses_of(pipeline(), ARRAYS, steps=8, batch_size=8)
    pipe = pipeline()
    first, result = losses_of(pipe, ARRAYS, steps=5, batch_size=8)
    second, _ = losses_of(pipe, ARRAYS, steps=8, batch_size=8, state=result.state)
    assert first + second == whole
    with pytest.raises(jpipe.InputError, match="steps: expected more than 5, the number of batches before state, found 5"):
        losses_of(pipe, ARRAYS, steps=5, batch_size=8, state=result.state)


@pytest.mark.parametrize(
    "data",
    [
        lambda ordered: ordered,
        lambda ordered: lambda t: ordered[t],
        lambda ordered: [ordered[t] for t in range(6)],
        lambda ordered: [jax.tree.map(jnp.asarray, ordered[t]) for t in range(6)],
    ],
    ids=["MapDataset", "function", "list", "JAX"],
)
def test_batches_by_number_are_those_of_shuffled_rows(data):
    dataset = grain.MapDataset.source(RowsOfArrays(ARRAYS)).shuffle(seed=3).repeat().batch(8)
    (expected, rows), (batches, _) = (fit_data.load(*arguments, 3, 6) for arguments in ((ARRAYS, None, 8), (data(dataset), None, None)))
    assert rows == 8
    for t in (5, 0, 2):
        check_equal(*(jax.tree.map(lambda leaf: leaf[:], each.train[t]) for each in (batches, expected)))


class Stops:
    """A callback that notes what it gets, and ends the run at a step."""

    def __init__(self, at):
        self.at, self.records = at, []

    def on_step(self, record):
        self.records.append(record)
        return "stop" if record.step == self.at else None

    def on_eval(self, record):
        self.records.append(record)

    def on_checkpoint(self, record):
        self.records.append(record)


def test_a_run_that_a_callback_stops_equals_a_shorter_one(tmp_path):
    stops = Stops(2)
    arguments = {"eval_data": BATCHES[:1], "eval_every": 2, "metrics": {"loss_again": squares}, **QUIET}
    result = jpipe_train.fit(pipeline(), BATCHES, steps=12, **arguments, callbacks=[stops], run_dir=tmp_path / "stopped")
    assert (result.summary.steps, result.summary.stopped_by) == (5, None)
    jpipe_train.fit(pipeline(), BATCHES, steps=5, **arguments, run_dir=tmp_path / "shorter")
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "shorter")
    assert "loss_again" not in (tmp_path / "shorter" / "config.yaml").read_text(), "no file names the function"
    check_equal(weights_of(tmp_path / "stopped"), weights_of(tmp_path / "shorter"))
    steps, evaluations = ([r for r in stops.records if isinstance(r, kind)] for kind in (jpipe_train.StepRecord, jpipe_train.EvalRecord))
    assert [record.step for record in steps] == [0, 1, 2, 3, 4]
    assert [record.step for record in evaluations] == [0, 2, 4]
    assert all(record.metrics == {"loss_again": record.loss} for record in evaluations)
    assert evaluations[-1].loss == result.summary.val_loss_after
    assert stops.records[-1] == jpipe_train.CheckpointRecord(5, tmp_path / "stopped" / "checkpoints" / "5")
    assert stops.records[-1].path.is_dir()


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (SimpleNamespace(), r"callbacks\[0\]: expected an object with at least one of the methods on_step, on_eval, on_checkpoint, found"),
        (SimpleNamespace(on_stop=print), r"callbacks\[0\]: unknown method 'on_stop' of SimpleNamespace; did you mean 'on_step'\?"),
        (SimpleNamespace(on_step=lambda record: True), r'expected on_step of SimpleNamespace to return None or "stop", found bool'),
    ],
)
def test_a_callback_that_would_do_nothing_is_refused(callback, message):
    with pytest.raises(jpipe.InputError, match=message):
        jpipe_train.fit(pipeline(), BATCHES, steps=2, callbacks=[callback], **QUIET)


@pytest.mark.parametrize(("callbacks", "found"), [(print, "builtin_function_or_method"), (Stops(1), "Stops"), (None, "NoneType")])
def test_callbacks_that_are_no_list_are_an_error(callbacks, found):
    with pytest.raises(jpipe.InputError, match=rf"callbacks: expected a list of objects, found {found}; write it as a list, \[callback\]"):
        Callbacks.__init__.__wrapped__(object.__new__(Callbacks), callbacks)


def test_the_best_checkpoint_of_a_function_stays_and_callbacks_get_each_checkpoint(tmp_path):
    stops = Stops(None)
    best = {"every": 1, "keep": 3, "best": {"metric": "val_mine", "mode": "min"}}
    arguments = {"eval_data": BATCHES[:1], "eval_every": 1, "metrics": {"mine": lambda outputs, labels: (labels.size - labels.size, 1)}}
    jpipe_train.fit(pipeline(), BATCHES, steps=6, **arguments, **QUIET, checkpoint=best, run_dir=tmp_path / "run", callbacks=[stops])
    assert [record.step for record in stops.records if isinstance(record, jpipe_train.CheckpointRecord)] == [1, 2, 3, 4, 5, 6]
    assert jpipe.checkpoints.steps(tmp_path / "run") == [1, 4, 5, 6], "of equal values the first one is the best"
    assert best_step(tmp_path / "run", "") == 1


class Iterated:
    def __iter__(self):
        return iter(BATCHES)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (iter(BATCHES), "an iterator"),
        ((batch for batch in BATCHES), "an iterator"),
        (Iterated(), "a Iterated"),
        (grain.MapDataset.source(BATCHES).to_iter_dataset(), "a PrefetchIterDataset"),
        (dict(enumerate(BATCHES)), "a dict"),
    ],
)
@pytest.mark.parametrize("name", ["data", "eval_data"])
def test_data_that_can_only_be_iterated_are_refused(data, found, name):
    with pytest.raises(
        jpipe.InputError,
        match=rf"{name}: expected batches that {name}\[t\] returns, found {found}, which cannot give batch t to a run that resumes",
    ):
        jpipe_train.fit(pipeline(), **{"data": BATCHES, name: data}, steps=2, **QUIET)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": ARRAYS}, "data: expected batches .* found arrays; also give batch_size"),
        ({"batch_size": 8}, "batch_size has no effect for data of type list"),
        ({"data": ARRAYS, "batch_size": True}, r"batch_size: expected a number from 1 to 20 \(data has 20 rows\), found True"),
        ({"data": ARRAYS, "batch_size": 21}, r"batch_size: expected a number from 1 to 20 \(data has 20 rows\), found 21"),
        (
            {"data": (X, X[:5]), "batch_size": 4},
            r"data: expected arrays with the same number of rows.* found the shapes \[20, 4\], \[5, 4\]",
        ),
        ({"steps": 13}, "data: expected one batch for each of 13 steps, found a list of 12 batches; repeat them, or lower"),
        ({"epochs": 2}, "fit: expected either steps or epochs, found steps=2 and epochs=2; give one of them"),
        ({"steps": None}, "fit: expected either steps or epochs, found neither; give one of them"),
        ({"steps": None, "epochs": -1}, "fit: epochs: expected a number above 0 and at most 1,000,000, found -1"),
        (
            {"steps": None, "epochs": 1, "data": lambda t: BATCHES[t]},
            "fit: epochs: expected data with a known length .* found a function without",
        ),
        ({"steps": None, "epochs": 1, "data": ARRAYS}, "data: expected batches .* found arrays; also give batch_size"),
        ({"steps": 0}, "fit: train.steps: expected greater than or equal to 1, found 0"),
        ({"data": [[1, 2]] * 2}, r"data: expected data\[0\] to be \(inputs, labels\).* found a list; return a tuple of two"),
        ({"data": [(X[:8], 1)] * 2}, r"found a int in it; convert it with np\.asarray"),
        (
            {"data": [BATCHES[0], (X[:4], X[:4])]},
            r"data: expected data\[1\] to have the shapes of data\[0\], .*float32\[8, 4\].*, found .*float32\[4, 4\]",
        ),
        ({"eval_data": []}, "eval_data: expected at least one batch, .* found a list of none"),
        ({"eval_data": lambda t: BATCHES[t]}, "eval_data: expected at least one batch, .* found a function without a length"),
        ({"checkpoint": 5}, "fit: checkpoint has no effect without run_dir"),
        ({"resume": "must"}, "fit: resume 'must' has no effect without run_dir"),
        ({"metrics": {"a": "acuracy"}}, "fit: eval.metrics: 'a': expected module:function or one of accuracy, "),
        (
            {"run_dir": "run", "checkpoint": {"best": {"metric": "val_min"}}, "eval_data": BATCHES, "metrics": {"mine": squares}},
            "checkpoint.best.metric: expected a result of the validations of this run, found 'val_min'; did you mean 'val_mine'",
        ),
        ({"run_dir": Path("s3://bucket/run")}, "fit: run.dir: expected a path on this machine, found the URL 's3:/bucket/run'; copy what"),
        ({"run_dir": "run", "checkpoint": {"best": {}}}, "fit: checkpoint.best has no effect without eval_data, .* give eval_data, or"),
        ({"run_dir": "run", "checkpoint": {"evry": 5}}, "fit: unknown key 'checkpoint.evry'; did you mean 'checkpoint.every'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_a_folder_is_made(arguments, message, tmp_path):
    with pytest.raises(jpipe.InputError, match=message):
        jpipe_train.fit(pipeline(), **{"data": BATCHES, "steps": 2, **QUIET, **arguments})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sigterm_saves_and_the_same_call_resumes(capsys):
    def batches(t):
        return BATCHES[t % 12]

    preempts = SimpleNamespace(on_step=lambda record: os.kill(os.getpid(), signal.SIGTERM) if record.step == 2 else None)
    result = jpipe_train.fit(pipeline(), batches, steps=10**5, run_dir="run", callbacks=[preempts], log=())
    assert result.summary.stopped_by == signal.SIGTERM
    assert 3 < result.summary.steps <= result.state.batch < 10**5
    assert "the same call of fit resumes there" in capsys.readouterr().out
    later, _ = losses_of(pipeline(), batches, steps=result.summary.steps + 3, run_dir="run")
    whole, _ = losses_of(pipeline(), batches, steps=result.summary.steps + 3)
    assert later == whole[result.summary.steps :]


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_without_checkpoints_interrupts():
    presses = SimpleNamespace(on_step=lambda record: os.kill(os.getpid(), signal.SIGINT) if record.step == 1 else None)
    with pytest.raises(KeyboardInterrupt, match="interrupted"):
        jpipe_train.fit(pipeline(), BATCHES, steps=9, callbacks=[presses], **QUIET)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_notebook_returns_a_state_that_goes_on(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    pipe, presses = pipeline(), SimpleNamespace(on_step=lambda record: os.kill(os.getpid(), signal.SIGINT) if record.step == 1 else None)
    first = jpipe_train.fit(pipe, BATCHES, steps=9, callbacks=[presses], **QUIET)
    assert first.summary.stopped_by == signal.SIGINT
    assert 2 < first.summary.steps == first.state.batch < 9
    again = jpipe_train.fit(pipe, BATCHES, steps=9, state=first.state, **QUIET)
    whole = jpipe_train.fit(pipe, BATCHES, steps=9, **QUIET)
    check_equal(pipe.params(again.state), pipe.params(whole.state))


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_in_a_notebook_does_not_end_the_session(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    presses = SimpleNamespace(on_step=lambda record: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        jpipe_train.fit(pipeline(), BATCHES, steps=9, callbacks=[presses], **QUIET)


@pytest.mark.slow
def test_a_run_from_python_can_be_exported_and_evaluated_with_functions_for_its_parts(tmp_path, capsys, monkeypatch):
    stack, (train, validation) = mlp.model(8, 2), mlp.data(0, 8)
    pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, "gpipe", 2), cross_entropy.loss, optax.adam(3e-3))
    result = jpipe_train.fit(pipe, train, steps=3, eval_data=validation, run_dir="run", **QUIET)
    assert cli.main(["export", "run", "--out", "weights.safetensors"]) == 0
    assert (tmp_path / "weights.safetensors").is_file()
    assert cli.main(["evaluate", "run", "--allow-code"]) == 2
    assert "--set model.target=module:function --set data.target=module:function --set loss.target=" in capsys.readouterr().err
    (tmp_path / "parts.py").write_text(
        "from examples.mlp import data, model\nfrom jpipe_train.losses.cross_entropy import loss as of_jpipe\n\n\n"
        "def small():\n    return model(8, 2)\n\n\ndef loss(outputs, labels):\n    return of_jpipe(outputs, labels)\n\n\n"
        "def points(seed, batch_size):\n    return data(seed, batch_size)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parts = [f"--set={key}.target=parts:{name}" for key, name in (("model", "small"), ("data", "points"), ("loss", "loss"))]
    assert cli.main(["evaluate", "run", "--allow-code", *parts]) == 0
    assert f"{result.summary.val_loss_after:.6g}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_callbacks_of_process_0_end_a_run_of_two_processes_at_one_step(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, "-m", "tests.train.run.fit_program", address]
    both = [
        subprocess.Popen([*words, str(index), tmp_path / "both"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], outputs
    alone = jpipe_train.fit(pipeline(), ARRAYS, steps=6, batch_size=8, eval_data=ARRAYS, eval_every=4, run_dir=tmp_path / "alone", **QUIET)
    ends = [re.findall(r"process \d: (\d+) steps, loss ([\d.e-]+), (.*)", output)[-1] for output in outputs]
    assert ends == [("6", repr(alone.summary.val_loss_after), folder) for folder in (str(tmp_path / "both"), "None")]
    assert rows_of(tmp_path / "both") == rows_of(tmp_path / "alone")
    check_equal(weights_of(tmp_path / "both"), weights_of(tmp_path / "alone"))
