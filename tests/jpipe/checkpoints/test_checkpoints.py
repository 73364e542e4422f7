"""Checkpoints from Python: a user's own loop saves, stops and resumes."""

import functools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import nnx

from jpipe import InputError, LayerStack, PeerLost, Pipeline, Plan, Tie, checkpoints
from jpipe.checkpoints import writing
from jpipe.processes import Processes
from jpipe.processes._channel import Limits
from jpipe.runtime import CopiesDiffer
from tests.jpipe import models
from tests.jpipe.running import KEY, check_equal

STACK = models.rich_stack()


def pipeline(schedule="pipedream_2bw", num_stages=3) -> Pipeline:
    return Pipeline(STACK, Plan.even(STACK.ids, num_stages, schedule, 3), models.masked_squares, models.momentum())


def train(pipe, batches, folder, until):
    """Train with the loop of docs/how-to/checkpoints.md and return the loss of each batch and the final parameters."""
    key, snapshot, losses = jax.random.key(KEY), None, {}
    state = checkpoints.load(pipe, folder, key, batches[0]) or pipe.init(key, batches[0])
    for t in range(state.batch, until):
        if snapshot is None and (t + 1) % 2 == 0:
            snapshot = pipe.snapshot(t + 1)
        state, metrics = pipe.step(state, batches[t], observe=snapshot)
        losses |= metrics.losses
        if snapshot is not None and snapshot.complete:
            checkpoints.save(folder, snapshot, keep=2, facts={"note": t})
            snapshot = None
    state = pipe.drain(state, observe=snapshot)
    return {t: float(loss) for t, loss in losses.items()}, jax.tree.map(np.asarray, pipe.params(state))


@pytest.mark.slow
def test_a_stopped_loop_resumes_with_equal_results(tmp_path):
    pipe, batches = pipeline(), models.masked_batches(8, 3)
    losses, params = train(pipe, batches, tmp_path / "whole", 8)
    train(pipe, batches, tmp_path / "parts", 6)
    last = checkpoints.steps(tmp_path / "parts")[-1]
    assert last < 6
    resumed, resumed_params = train(pipe, batches, tmp_path / "parts", 8)
    assert resumed == {t: loss for t, loss in losses.items() if t >= last}
    check_equal(resumed_params, params)
    assert len(checkpoints.steps(tmp_path / "parts")) == 2
    assert checkpoints.Checkpoint(tmp_path / "parts", last).facts["note"] >= last - 1


def test_a_checkpoint_with_the_activations_that_version_0_4_remembered_is_read_without_them(tmp_path):
    pipe, batches = pipeline("gpipe"), models.masked_batches(1, 3)
    state, snapshot = pipe.init(jax.random.key(KEY), batches[0]), pipe.snapshot(1)
    state, _ = pipe.step(state, batches[0], observe=snapshot)
    layers = snapshot.layers()
    layers[pipe.plan.stages[1].layers[0]]["remembered"] = {"received": {"0": np.ones((4, 3), np.float32)}}
    writing.write_layers(tmp_path, 1, layers, 0)
    writing.complete(tmp_path, 1, 1, {})
    loaded = checkpoints.load(pipe, tmp_path, jax.random.key(KEY), batches[0])
    check_equal(pipe.params(loaded), pipe.params(state))


@pytest.mark.slow
def test_a_checkpoint_resumes_under_another_plan(tmp_path):
    pipe, batches = pipeline(), models.masked_batches(6, 3)
    train(pipe, batches, tmp_path, 6)
    step, other = checkpoints.steps(tmp_path)[0], pipeline("gpipe", 2)
    state = checkpoints.load(other, tmp_path, jax.random.key(KEY), batches[0], step)
    assert state.batch == step
    newest = {name: plain["params"]["0"] for name, plain in checkpoints.Checkpoint(tmp_path, step).read().items()}
    check_equal(jax.tree.map(np.asarray, other.params(state)), newest)


@pytest.mark.slow
def test_invalid_arguments_of_save_and_load_are_refused(tmp_path):
    pipe, batches = pipeline(), models.masked_batches(4, 3)
    key = jax.random.key(KEY)
    assert checkpoints.load(pipe, tmp_path / "none", key, batches[0]) is None
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file.checkpoints: expected a folder, found a file in its place; choose another run\.dir$"):
        checkpoints.steps(tmp_path / "file")
    pipe.init(key, batches[0])
    with pytest.raises(InputError, match="expected a complete snapshot, found one at batch 2, which its run has not reached yet"):
        checkpoints.save(tmp_path, pipe.snapshot(2))
    train(pipe, batches, tmp_path, 4)
    (step,) = checkpoints.steps(tmp_path)
    with pytest.raises(InputError, match=rf"step: expected one of {step}, the checkpoints in '.*', found 7"):
        checkpoints.load(pipe, tmp_path, key, batches[0], 7)
    other = models.plain_stack()
    with pytest.raises(InputError, match=r"the checkpoint of step \d lacks layer 'layer0'; is it of another model\?"):
        checkpoints.load(Pipeline(other, Plan.even(other.ids, 2, "gpipe", 3), models.squares, models.momentum()), tmp_path, key, batches[0])
    (tmp_path / "checkpoints" / str(step) / "metrics.jsonl").write_text("changed")
    with pytest.raises(InputError, match="none of its checkpoints is complete and undamaged"):
        checkpoints.load(pipe, tmp_path, key, batches[0])


@pytest.mark.slow
def test_copies_of_a_shared_parameter_that_differ_are_not_saved(tmp_path):
    """Differences in the weights or only in the optimizer state of any replica are detected."""
    ties = [Tie(("in", "kernel"), ("out", "kernel"))]
    linear = functools.partial(nnx.Linear, 3, 3)
    stack = LayerStack({"in": lambda rngs: linear(rngs=rngs), "out": lambda rngs: linear(rngs=rngs)}, ties=ties)
    plan = Plan.even(stack.ids, 2, "pipedream_2bw", 2, replicas=(1, 2))
    pipe = Pipeline(stack, plan, models.squares, models.momentum(), [jax.devices()[s] for s, _ in plan.workers])
    batch = np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)

    def saved(at: int, change=None) -> None:
        state = pipe.init(jax.random.key(KEY), batch)
        snapshot = pipe.snapshot(at)
        for t in range(at + 2):
            if t == 1 and change is not None:
                change(state.workers)
            state, _ = pipe.step(state, batch, observe=snapshot)
        pipe.drain(state, observe=snapshot)
        checkpoints.save(tmp_path, snapshot)

    def weights(workers) -> None:
        newest = workers[2].weights.read(workers[2].weights.newest)
        newest["in shared kernel"] = newest["in shared kernel"] + 0.25

    def momenta(workers) -> None:
        workers[1].optimizer["in shared kernel"] = jax.tree.map(lambda leaf: leaf + 1, workers[1].optimizer["in shared kernel"])

    saved(2)
    for change, where in (weights, "stage 1, replica 1"), (momenta, "stage 1"):
        with pytest.raises(
            CopiesDiffer,
            match=rf"^checkpoint of step 3: the copies of 'in shared kernel' at stage 0 and at {where} are not .* after batch 2;",
        ):
            saved(3, change)
    assert checkpoints.steps(tmp_path) == [2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


class Alone(Processes):
    """Process 0 of three, of which one has called `save`, another has not."""

    def __init__(self, absent=()):
        super().__init__(0, 1, Limits())
        self.count, self.left, self.checks = 3, set(absent), 0
        self.broadcast("process 1 begins its part of the checkpoint of step 4", b"")

    def still(self):
        return 6.0

    def finished(self):
        return self.left

    def check(self):
        self.checks += 1
        if self.checks == 3:
            self._channel._take({"lost": "process 2 hangs"})
        super().check()


def test_process_0_names_the_processes_that_do_not_save(monkeypatch, capfd):
    monkeypatch.setattr(checkpoints, "_PATIENCE", 0.0)
    with pytest.raises(PeerLost, match=r"process 2 hangs; process 0 stops while waiting for the call of .*save for step 4 of process 2"):
        checkpoints._await_calls(Alone(), 4)
    message = "jpipe: the checkpoint of step 4 waits for process 2 to call checkpoints.save; call it in all processes\n"
    assert capfd.readouterr().err == message, "once"
    with pytest.raises(
        InputError, match=r"step 4: expected all processes to call checkpoints.save, process 2 finished without calling it; call"
    ):
        checkpoints._await_calls(Alone({1, 2}), 4)


def managed(pipe, batches, manager, until):
    """Train as `train` does, with a checkpoint manager as docs/how-to/checkpoints.md uses it; return the losses by batch."""
    key, snapshot, losses, step = jax.random.key(KEY), None, {}, manager.latest_step()
    state = pipe.init(key, batches[0]) if step is None else pipe.restore(key, batches[0], manager.restore(step), step)
    for t in range(state.batch, until):
        snapshot = snapshot or pipe.snapshot(t + 1)
        state, metrics = pipe.step(state, batches[t], observe=snapshot)
        losses |= metrics.losses
        if snapshot.complete:
            manager.save(snapshot.batch, args=ocp.args.PyTreeSave(jax.device_get(snapshot.layers())))
            snapshot = None
    pipe.drain(state)
    return {t: float(loss) for t, loss in losses.items()}


def test_a_checkpoint_manager_saves_and_restores_by_its_options(tmp_path):
    pipe, batches = pipeline(num_stages=2), models.masked_batches(8, 3)
    losses, _ = train(pipe, batches, tmp_path / "run", 6)
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(tmp_path / "managed", options=options) as manager:
        managed(pipe, batches, manager, 5)
    with ocp.CheckpointManager(tmp_path / "managed", options=options) as manager:
        (step,) = manager.all_steps()
        assert step > 1
        resumed = managed(pipe, batches, manager, 6)
        assert {t: resumed[t] for t in range(step, 5)} == {t: losses[t] for t in range(step, 5)}


def test_a_checkpoint_manager_restores_a_run(tmp_path):
    pipe, batches = pipeline(num_stages=2), models.masked_batches(4, 3)
    train(pipe, batches, tmp_path, 4)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        (step,) = manager.all_steps()
        assert manager.restore(step).keys() == checkpoints.Checkpoint(tmp_path, step).read().keys()


def test_however_many_arrays_a_checkpoint_has_its_index_is_read_once(tmp_path):
    def bytes_read():
        metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in metrics for value in metric["values"])

    writing.write_layers(tmp_path, 1, {f"layer {n}": {"params": {"0": {"w": np.ones(4, np.float32)}}} for n in range(100)}, 0)
    writing.complete(tmp_path, 1, 1, None)
    before, size = bytes_read(), sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert len(checkpoints.Checkpoint(tmp_path, 1).specs()) == 100
    assert bytes_read() - before < size
