"""Every reading of weights under every way to hold them: pairs of options, each compared with a sequential run of the rule in float64."""

import functools
import random
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from jpipe import InputError, LayerStack, Pipeline, Plan, Precision, Tie
from jpipe.optimizers import compensated_adamw, scale_by_delay
from tests.jpipe import models, monolith, reference, running

STEPS, CUT = 5, 3
WIDTH, ROWS = 4, 4
TIE = Tie(("b", "w"), ("d", "w"))
WHAT = ("schedule", "num_stages", "microbatches", "replicas", "vertical_sync", "flush_first", "chunks_per_rank", "agree", "links")
WHERE = ("shard_optimizer", "offload", "mesh", "fsdp", "sum_parts")  # fields of plans that change no number
OPTIONS = ("delay_correction", "ema_decay", "precision", "clip_global_norm", "clip_stage_norm", "skip_nonfinite")
ROUNDED = {"precision", "links", "agree", "clip_global_norm", "clip_stage_norm"}
"""With one of these, the same run in the simplest place is what readings are compared with."""
PLACES: dict[str, dict] = {
    "one device": {},
    "shared optimizer": {"shard_optimizer": True},
    "optimizer in host memory": {"offload": {"optimizer": "all"}},
    "versions in host memory": {"offload": {"versions": "all"}},
    "both in host memory": {"offload": {"optimizer": "all", "versions": "all"}},
    "shared optimizer in host memory": {"shard_optimizer": True, "offload": {"optimizer": "all", "versions": [0]}},
    "rows on a mesh": {"mesh": {"data": 2}},
    "weights on a mesh": {"mesh": {"data": 2, "model": 2}, "fsdp": True},
    "shared optimizer on a mesh": {"shard_optimizer": True, "mesh": {"model": 2}},
    "sums in parts": {"sum_parts": 2},
    "shared optimizer, sums in parts": {"shard_optimizer": True, "sum_parts": 2},
}
SCHEDULES: dict[str, dict] = {
    "2BW": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 4},
    "2BW, one stage": {"schedule": "pipedream_2bw", "num_stages": 1, "microbatches": 2},
    "2BW, flushed first": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 4, "flush_first": 2},
    "2BW in chunks": {"schedule": "pipedream_2bw", "num_stages": 4, "microbatches": 8, "chunks_per_rank": 2},
    "pipedream": {"schedule": "pipedream", "num_stages": 2, "microbatches": 2},
    "pipedream, three stages": {"schedule": "pipedream", "num_stages": 3, "microbatches": 2},
    "vertical sync": {"schedule": "pipedream", "num_stages": 3, "microbatches": 2, "vertical_sync": True},
    "flush": {"schedule": "pipedream_flush", "num_stages": 2, "microbatches": 2},
    "zb_h1": {"schedule": "zb_h1", "num_stages": 2, "microbatches": 4},
    "zb_v": {"schedule": "zb_v", "num_stages": 4, "microbatches": 4},
}
REPLICAS: dict[str, dict] = {"one": {}, "two": {"replicas": 2}, "two and one": {"replicas": (2, 1)}}
CORRECTIONS: dict[str, dict] = {
    "none": {},
    "predict": {"delay_correction": "predict"},
    "a factor": {"delay_correction": 0.75},
    "adam and predict": {"optimizer": "adam", "delay_correction": "predict"},
    "spikes": {"optimizer": "compensated"},
    "spikes and a factor": {"optimizer": "compensated", "delay_correction": 0.5},
    "scale": {"optimizer": "scaled"},
    "scale and predict": {"optimizer": "scaled", "delay_correction": "predict"},
}
EXTRAS: dict[str, dict] = {
    "nothing": {},
    "average": {"ema_decay": 0.75},
    "ties": {"tied": True},
    "frozen": {"freezes": True},
    "clipped": {"clip_global_norm": 0.5},
    "skipping": {"skip_nonfinite": True},
    "clipped by stage": {"clip_stage_norm": 0.5},
    "masters": {"precision": Precision(params="bfloat16")},
    "masters, average": {"precision": Precision(params="bfloat16"), "ema_decay": 0.75},
    "masters, ties": {"precision": Precision(params="bfloat16"), "tied": True},
    "masters, frozen": {"precision": Precision(params="bfloat16"), "freezes": True},
    "float16, loss scale": {"precision": Precision(params="float16", loss_scale="dynamic")},
    "loss scale": {"precision": Precision(loss_scale="dynamic")},
    "messages in 8 bits": {"links": {"activations": "int8", "gradients": "bfloat16"}},
    "sums in 8 bits": {"links": {"sums": "int8"}},
    "agree": {"agree": {"every": 2}},
    "agree late": {"agree": {"every": 2, "delay": 1}},
    "agree by stage": {"agree": {"every": 3, "fragments": "stages"}},
}
LATER: dict[str, dict] = {  # to which a run is restored, all in one process
    "flush": {"schedule": "pipedream_flush", "num_stages": 3, "microbatches": 4},
    "2BW, shared optimizer": {"schedule": "pipedream_2bw", "num_stages": 1, "microbatches": 4, "replicas": 2, "shard_optimizer": True},
    "pipedream, host memory": {"schedule": "pipedream", "num_stages": 3, "microbatches": 2, "offload": {"optimizer": "all"}},
    "gpipe on a mesh": {"schedule": "gpipe", "num_stages": 1, "microbatches": 2, "mesh": {"data": 2}},
}


@functools.cache
def stack_of(is_tied: bool) -> LayerStack:
    """Build four dense layers that name the axes of their parameters, for meshes."""
    axes = [("embed", "mlp"), ("mlp", "embed"), ("embed", "mlp"), ("mlp", "embed")]
    layers = {i: replace(models.dense(WIDTH), axes={"w": names, "b": names[1:]}) for i, names in zip("abcd", axes, strict=True)}
    return LayerStack(layers, ties=[TIE] if is_tied else ())


def is_frozen(path) -> bool:
    return path[0].key == "c" or path[-1].key == "b"


@functools.cache
def optimizer_of(name: str, freezes: bool) -> optax.GradientTransformation:
    optimizers = {
        "momentum": models.momentum,
        "adam": lambda: optax.adam(optax.linear_schedule(0.05, 0.01, 4)),
        "compensated": lambda: compensated_adamw(0.05),
        "scaled": lambda: optax.chain(optax.adam(0.05), scale_by_delay(3)),
    }
    if not freezes:
        return optimizers[name]()

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "frozen" if is_frozen(path) else "trained", params)

    return optax.partition({"trained": optimizers[name](), "frozen": optax.set_to_zero()}, labels)


def pipeline_of(case: dict[str, Any], plan_fields: dict[str, Any]) -> Pipeline:
    stack, optimizer = stack_of(case.get("tied", False)), optimizer_of(case.get("optimizer", "momentum"), case.get("freezes", False))
    options = {name: case[name] for name in OPTIONS if name in case}
    return Pipeline(stack, Plan.even(stack.ids, **plan_fields), models.masked_squares, optimizer, **options)


class Expected(NamedTuple):
    """What readings give after each number of batches: weights, their average, an evaluation, and the norm of the prediction."""

    params: list[Any]
    average: list[Any]
    loss: list[float]
    outputs: list[Any]
    ahead: list[float] | None


def sequential(pipe, batches, start) -> Expected:
    """Apply the rule to one batch after the other; each parameter is updated by itself."""
    plan, stack, m, y, x, average = pipe.plan, pipe.stack, pipe.plan.microbatches, [start], [start], [start]
    stage_of = {i: s for s, stage in enumerate(plan.stages) for i in stage.layers}
    places = [(i, name) for i in stack.ids for name in start[i]]
    delayed_as = {place: stage_of["b" if stack.ties.shared and place == ("d", "w") else place[0]] for place in places}
    optimizer, (gradient_of, _) = optax.with_extra_args_support(pipe.optimizer), monolith.compiled(stack, pipe.loss, None)
    states = {place: optimizer.init(only(start, place)) for place in places}
    for t, batch in enumerate(batches):
        parts = [jax.tree.map(lambda leaf, j=j: np.split(leaf, m)[j], batch) for j in range(m)]
        read = [[reference.version(plan, s, t * m + j) for j in range(m)] for s in range(plan.depth)]
        trees = [{i: x[read[stage_of[i]][j]][i] for i in stack.ids} for j in range(m)]
        _, gradient = gradient_of(trees, {i: {} for i in stack.ids}, parts, 0, jax.random.key(0))
        if stack.ties.shared:
            gradient["b"]["w"] = gradient["d"]["w"] = gradient["b"]["w"] + gradient["d"]["w"]
        ordinary, predicted = jax.tree.map(np.asarray, (y[-1], y[-1]))
        for place in places:
            delay = np.float32(t - np.mean(read[delayed_as[place]]))
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                arguments = only(gradient, place), states[place], only(x[-1], place)
                updates, states[place] = optimizer.update(*arguments, delay=delay, stage=np.int32(delayed_as[place]))
            (i, name), update = place, np.asarray(updates[place[0]][place[1]])
            ordinary[i][name] = ordinary[i][name] + update
            predicted[i][name] = ordinary[i][name] + (pipe.delay_factor or 0.0) * float(delay) * update
        y.append(ordinary)
        x.append(predicted)
        average.append(jax.tree.map(lambda mean, new: 0.75 * mean + 0.25 * new, average[-1], ordinary))
    evaluated = [evaluation(pipe, params, batches[0]) for params in y]
    ahead = [norm_of(jax.tree.map(np.subtract, predicted, ordinary)) for predicted, ordinary in zip(x, y, strict=True)]
    return Expected(y, average, *map(list, zip(*evaluated, strict=True)), ahead)


def only(tree, place):
    return {place[0]: {place[1]: tree[place[0]][place[1]]}}


def norm_of(tree) -> float:
    return float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree))))


def evaluation(pipe, params, batch) -> tuple[float, Any]:
    """Return the loss and the outputs of a batch."""
    outputs, _ = pipe.stack.apply(pipe.stack.ids, params, {i: {} for i in pipe.stack.ids}, batch[0], key=None, microbatch=None, train=False)
    total, weight = pipe.loss(outputs, batch[1])
    return float(total / weight), np.asarray(outputs)


def in_the_simplest_place(case, batches) -> Expected:
    """Return what the same run gives on one device for each worker, with nothing in flight when it is read."""
    names = (*WHAT, "mesh", "fsdp") if "sums" in case.get("links", {}) else WHAT  # each shard of compressed sums is rounded by itself
    pipe = pipeline_of(case, {name: case[name] for name in names if name in case})
    state, states = running.fresh(pipe, batches), []
    for batch in batches:
        states.append(pipe.drain(models.copied(state)))
        state, _ = pipe.step(state, batch)
    states.append(pipe.drain(state))
    averages = [on_host(pipe.params(each, weights="ema")) if pipe.ema_decay is not None else None for each in states]
    losses = [float(pipe.evaluate(each, batches[0]).loss) for each in states]
    outputs = [pipe.predict(each, batches[0][0]) for each in states]
    return Expected([on_host(pipe.params(each)) for each in states], averages, losses, outputs, None)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def check_reading(pipe, state, t, expected, batch, tolerance) -> None:
    """Compare all readings of a state after t batches."""
    close, is_drained = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), state.start == state.batch
    evaluated = pipe.evaluate(state, batch)
    v = t if pipe.plan.agree is not None else evaluated.version
    assert v == t if is_drained else t - 2 <= v <= t
    assert is_drained or v == version_of(pipe, t, v)
    close(float(evaluated.loss), expected.loss[v])
    close(pipe.predict(state, batch[0]), expected.outputs[v])
    jax.tree.map(close, on_host(pipe.params(state)), expected.params[t if pipe.precision.has_masters else v])
    if pipe.ema_decay is not None:
        jax.tree.map(close, on_host(pipe.params(state, weights="ema")), expected.average[t])
    correction = float(pipe.delay_norms(state).correction)
    assert correction >= 0
    if is_drained and expected.ahead is not None and not pipe.stack.ties.shared:
        close(correction, expected.ahead[t])


def version_of(pipe, t, found) -> int:
    """Return the version that is evaluated in flight, where the pages say it."""
    plan = pipe.plan
    if pipe.delay_factor is not None and any(plan.delays):
        return t
    if max(plan.replicas) > 1 or plan.vertical_sync or plan.agree is not None or plan.depth == 1:
        return found
    return t if plan.schedule == "pipedream" else t - 1 if t > plan.flush_first else t


class Case(NamedTuple):
    """What meets: names in the tables above."""

    schedule: str
    replicas: str = "one"
    place: str = "one device"
    correction: str = "none"
    extra: str = "nothing"
    later: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the plan and the options of the pipeline."""
        tables = SCHEDULES, REPLICAS, PLACES, CORRECTIONS, EXTRAS
        return {name: value for table, key in zip(tables, self[:-1], strict=True) for name, value in table[key].items()}

    def pipeline(self) -> Pipeline:
        return pipeline_of(self.fields, {name: value for name, value in self.fields.items() if name in (*WHAT, *WHERE)})

    def later_pipelines(self) -> list[Pipeline]:
        """Return pipelines for a restored run, without and with a correction; none if activations are rounded at other cuts."""
        if self.later is None or "links" in self.fields:
            return []
        return [pipeline_of({**self.fields, "delay_correction": factor}, LATER[self.later]) for factor in (None, "predict")]


def check(case: Case, seed: int = 0) -> None:
    """Train, and compare what is read in flight, after a drain, and of runs that are restored from a live snapshot."""
    has_masters = "precision" in case.fields and case.fields["precision"].has_masters
    with jax.enable_x64(not has_masters):
        pipe, dtype, tolerance = case.pipeline(), *((np.float32, 2e-2) if has_masters else (np.float64, 1e-10))
        batches = models.masked_batches(STEPS, pipe.plan.microbatches, rows=ROWS, width=WIDTH, dtype=dtype)
        state, snapshot = running.fresh(pipe, batches), pipe.snapshot(CUT)
        if ROUNDED & case.fields.keys():
            expected = in_the_simplest_place(case.fields, batches)
        else:
            expected = sequential(pipe, batches, on_host(pipe.params(state)))
        looks = random.Random(seed).sample(range(1, STEPS + 1), 2)
        for t, batch in enumerate(batches, 1):
            state, _ = pipe.step(state, batch, observe=snapshot)
            if t in looks:
                check_reading(pipe, state, t, expected, batches[0], tolerance)
        state = pipe.drain(state, observe=snapshot)
        check_reading(pipe, state, STEPS, expected, batches[0], tolerance)
        layers = snapshot.layers()
        state = pipe.restore(jax.random.key(running.KEY), batches[0], layers, CUT)
        check_reading(pipe, state, CUT, expected, batches[0], tolerance)
        for batch in batches[CUT:]:
            state, _ = pipe.step(state, batch)
        check_reading(pipe, pipe.drain(state), STEPS, expected, batches[0], tolerance)
        for other in case.later_pipelines():
            state = other.restore(jax.random.key(running.KEY), batches[0], layers, CUT)
            check_reading(other, state, CUT, expected._replace(ahead=None), batches[0], tolerance)


QUICK = [
    Case("2BW, one stage", "two", "shared optimizer", "predict", later="2BW, shared optimizer"),
    Case("pipedream", "one", "optimizer in host memory", "a factor", later="gpipe on a mesh"),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_readings_of_options_that_met_badly(case):
    check(case)


def drawn(draw: random.Random) -> Case:
    """Return a case that is possible."""
    while True:
        case = Case(*(draw.choice(list(options)) for options in (SCHEDULES, REPLICAS, PLACES, CORRECTIONS, EXTRAS, [None, *LATER])))
        try:
            case.pipeline()
            case.later_pipelines()
            return case
        except InputError:
            continue


@pytest.mark.thinned(most=0, most_slow=3)
@pytest.mark.parametrize("seed", range(100))
def test_readings_of_options_that_meet_at_random(seed):
    check(drawn(random.Random(seed)), seed)
