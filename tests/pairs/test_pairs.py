"""Two capabilities at a time, drawn at random, compared with a plain float64 reference of the rule."""

import functools
import itertools
import zlib
from typing import Any

import jax
import numpy as np
import pytest

from jpipe import Pipeline, State
from tests.jpipe.reference import ASYNCHRONOUS, in_flight, version
from tests.pairs import seeds
from tests.pairs.draw import KEY, LAYERS, READINGS, ROWS, STEPS, Case, draw
from tests.pairs.reference import Run

QUICK, ALL = 20, 400
TOLERANCE = 1e-9
TOLERANCE_OF_MULTISTEPS = 1e-6  # optax computes its mean over batches with factors of 32 bits


def check(case: Case) -> None:
    """Train, read, resume, and compare everything with the reference."""
    with jax.enable_x64(True):
        pipe, rows = case.setting.pipeline(), ROWS * case.setting.microbatches
        tolerance = TOLERANCE if case.setting.rule.accumulated == 1 else TOLERANCE_OF_MULTISTEPS
        batches = case.setting.data.batches(zlib.crc32(case.seed.encode()), rows)
        state = pipe.init(jax.random.key(KEY), batches[0], buckets=batches[1:] if case.setting.data.lengths else ())
        start = {(layer, name): np.asarray(leaf) for layer, params in pipe.params(state).items() for name, leaf in params.items()}
        run, snapshot, saved = case.setting.reference(pipe.plan, start), pipe.snapshot(case.cut), None
        reader = Reader(pipe, batches, tolerance)
        for t in range(STEPS):
            reader.read(state, run, case.readings[t])
            state = reader.step(state, run, t, snapshot)
            if t + 1 == case.cut:
                saved = run.snapshot()  # before a drain, which a run that went on would not have made
            if t + 1 in case.drained:
                state = reader.drain(state, run, snapshot)
        state = reader.finish(state, run, snapshot)
        assert saved is not None
        layers = jax.tree.map(np.asarray, snapshot.layers())
        for setting in filter(None, (case.setting, case.later)):
            other = pipe if setting is case.setting else setting.pipeline()
            resumed = saved.resumed(other.plan, setting.options, setting.rule)
            buckets = batches[1:] if case.setting.data.lengths else ()
            state = other.restore(jax.random.key(KEY), batches[0], layers, case.cut, buckets=buckets)
            reader = Reader(other, batches, tolerance)
            for t in range(case.cut, STEPS):
                reader.read(state, resumed, case.readings[t] if t > case.cut else READINGS)
                state = reader.step(state, resumed, t)
            reader.finish(state, resumed)


class Reader:
    """Runs a pipeline beside the reference, and compares what both say."""

    def __init__(self, pipe: Pipeline, batches: list[Any], tolerance: float) -> None:
        self.pipe, self.batches, self.tolerance, self.metrics = pipe, batches, tolerance, {}

    def note(self, metrics: Any) -> None:
        for name, values in metrics._asdict().items():
            self.metrics.setdefault(name, {}).update(values)

    def step(self, state: State, run: Run, t: int, snapshot: Any = None) -> State:
        state, metrics = self.pipe.step(state, self.batches[t], observe=snapshot)
        self.note(metrics)
        run.step(*self.batches[t])
        return state

    def drain(self, state: State, run: Run, snapshot: Any = None) -> State:
        state, metrics = self.pipe.drain(state, with_metrics=True, observe=snapshot)
        self.note(metrics)
        run.drain()
        return state

    def finish(self, state: State, run: Run, snapshot: Any = None) -> State:
        """Read a last time in flight, then drain, and compare metrics and all readings."""
        self.read(state, run, READINGS)
        state = self.drain(state, run, snapshot)
        self.read(state, run, READINGS)
        for name, expected in run.metrics.items():
            actual = {t: float(value) for t, value in self.metrics[name].items()}
            assert actual.keys() == expected.keys(), name
            for t, value in expected.items():
                self.close(actual[t], value, f"{name} of batch {t}")
        return state

    def close(self, actual: Any, expected: Any, where: str) -> None:
        np.testing.assert_allclose(actual, expected, rtol=self.tolerance, atol=self.tolerance, err_msg=where)

    def read(self, state: State, run: Run, what: tuple[str, ...]) -> None:
        """Compare some readings of a state."""
        (x, labels), pipe = self.batches[-1], self.pipe
        averages = ("newest",) if pipe.ema_decay is None else ("newest", "ema")
        for weights in averages if what else ():
            evaluated = pipe.evaluate(state, (x, labels), weights=weights)
            v = evaluated.version
            if weights == "ema" or pipe.plan.agree is not None:
                v = run.batch
            else:
                check_version(pipe, run.batch, v, state.start == state.batch)
            where = f"{weights} weights after {run.batch} batches, version {v}"
            params = run.read(v, weights)
            if "evaluate" in what:
                self.close(float(evaluated.loss), run.evaluate(params, x, labels, ROWS), f"evaluate, {where}")
            if "predict" in what:
                count = len(x) - len(x) // 3
                self.close(pipe.predict(state, x[:count], weights=weights), run.predict(params, x[:count], ROWS), f"predict, {where}")
            if "params" in what:
                actual = pipe.params(state, weights=weights)
                for layer, name in itertools.product(LAYERS, "wb"):
                    self.close(np.asarray(actual[layer][name]), params[layer, name], f"params of {layer}/{name}, {where}")


def check_version(pipe: Pipeline, t: int, v: int, is_drained: bool) -> None:
    """Check that a reading has a version that the pages allow: all stages hold it, and it is the newest such one."""
    plan = pipe.plan
    oldest = min(version(plan, s, t * plan.microbatches) // plan.updates_per_batch(s) for s in range(plan.depth))
    exact = {t} if is_drained or plan.schedule not in ASYNCHRONOUS or (pipe.delay_factor is not None and any(plan.delays)) else None
    if exact is None and max(plan.replicas) == 1 and plan.depth == len(plan.pipeline_ranks) and in_flight(plan, 0) > 1 and t:
        if plan.schedule == "pipedream_2bw":
            exact = {t - 1 if t > plan.flush_first else t}
        elif not plan.vertical_sync:
            exact = {t}
    assert v in (exact or range(oldest, t + 1)), f"version {v} after {t} batches, expected {exact or (oldest, t)}"


@functools.cache
def case_of(number: int) -> Case:
    """Return the case of a number, the first one that the library allows; print what it refuses on the way."""
    for attempt in itertools.count():
        drawn = draw(f"{seeds.seed()[0]}-{number}" + (f"-{attempt}" if attempt else ""))
        if isinstance(drawn, Case):
            return drawn
        print(drawn.describe())
    raise AssertionError


NUMBERS = [pytest.param(number, marks=pytest.mark.slow if number < QUICK else pytest.mark.exhaustive) for number in range(ALL)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_pair_equals_the_reference(number):
    """The seed is printed at the top of the run; `JPIPE_PAIRS=SEED` repeats it."""
    case = case_of(number)
    print(case.describe())
    check(case)
