"""Ctrl-C and failures during a step: the caller's state continues with the right numbers, or reports why it is lost."""

import inspect
import os
import pathlib
import random
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest

from jpipe import InputError, Pipeline, Plan
from jpipe import _interrupts as interrupts
from jpipe.runtime import _interpreter as interpreter
from jpipe.runtime._metrics import Metrics
from tests.jpipe import models, running

BATCHES = 4
PLAN = Plan.even(models.plain_stack().ids, 2, schedule="pipedream_2bw", microbatches=2)


@pytest.fixture(scope="module")
def pipe():
    return Pipeline(models.plain_stack(), PLAN, models.squares, models.momentum(), clip_global_norm=1.0)


@pytest.fixture(scope="module")
def batches():
    return models.batches_of(BATCHES, 4)


@pytest.fixture(scope="module")
def fresh(pipe, batches):
    return running.fresh(pipe, batches)


@pytest.fixture(scope="module")
def start_state(pipe, batches, fresh):
    """Return a state before the last batch, with microbatches in flight."""
    state, _ = finish_training(pipe, models.copied(fresh), batches[:-1])
    return state


@pytest.fixture(scope="module")
def expected(pipe, batches, start_state):
    """Return the outcome of the last batch without an interruption."""
    return outcome(pipe, *finish_training(pipe, models.copied(start_state), batches))


def finish_training(pipe, state, batches, metrics=None):
    """Train from `state.batch` to the last batch, as after an interruption, and return the state and all metrics."""
    metrics = metrics or Metrics.empty()
    while state.batch < len(batches):
        state, more = pipe.step(state, batches[state.batch])
        metrics = interrupts.merged(metrics, more)
    return state, metrics


def outcome(pipe, state, metrics):
    """Return all metrics and the final weights."""
    state, more = pipe.drain(state, with_metrics=True)
    return jax.tree.map(np.asarray, (interrupts.merged(metrics, more)._asdict(), pipe.params(state)))


class Interrupting:
    """A tracer that sends SIGINT at the n-th line of jpipe's code, or at the n-th instruction of some functions."""

    def __init__(self, at: int, functions: tuple = ()):
        self.at, self.count, self.codes = at, 0, {function.__code__ for function in functions}

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(str(CODE)):
            return None
        if frame.f_code is STEP.__code__ and "result" in frame.f_locals:
            return self.trace  # after the result is taken there is no instruction at which Python would look for signals
        if self.codes:
            frame.f_trace_opcodes, frame.f_trace_lines = frame.f_code in self.codes, False
            if event != "opcode":
                return self.trace
        self.count += 1
        if self.count == self.at:
            signal.raise_signal(signal.SIGINT)
        return self.trace


CODE = pathlib.Path(interrupts.__file__).parent


def undecorated(function):
    """Return the function without the annotation checks that the tests wrap around it."""
    return inspect.unwrap(function)


STEP = undecorated(Pipeline.step)
HANDING_OVER = (STEP, undecorated(interrupts.consuming), undecorated(interrupts.delayed_signals))


def interrupted(pipe, start_state, batches, expected, at, functions=()):
    """Interrupt a step, check its numbers, and return whether the interruption happened and the number of possible places."""
    state, metrics, hit, tracer = models.copied(start_state), Metrics.empty(), False, Interrupting(at, functions)
    try:
        with tracer:
            state, metrics = STEP(pipe, state, batches[-1])
    except KeyboardInterrupt:
        hit = True
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    running.check_equal(outcome(pipe, *finish_training(pipe, state, batches, metrics)), expected)
    return hit, tracer.count


@pytest.mark.parametrize("functions", [(), HANDING_OVER], ids=["lines", "instructions where the result is handed over"])
def test_ctrl_c_at_any_moment_of_a_step(pipe, start_state, batches, expected, functions):
    hit, count = interrupted(pipe, start_state, batches, expected, -1, functions)
    assert not hit
    points = range(1, count + 1, max(count // 30, 1))
    results = [interrupted(pipe, start_state, batches, expected, at, functions) for at in points]
    # The step that was counted may have had some lines more, of what is done once or while it waits.
    assert all(hit or lines < at for at, (hit, lines) in zip(points, results, strict=True))
    assert sum(hit for hit, _ in results) >= 0.9 * len(points)


def raising(error, after=5):
    """Return an observer that raises `error` after it sees more than `after` instructions, and the list of those it sees."""
    seen = []

    def observe(event):
        seen.append(event.instruction)
        if len(seen) > after:
            raise error

    return observe, seen


def test_an_observers_exception_is_raised_when_the_step_is_complete(pipe, start_state, batches, expected):
    observe, seen = raising(ZeroDivisionError("mine"))
    state = models.copied(start_state)
    with pytest.raises(ZeroDivisionError, match="mine"):
        pipe.step(state, batches[-1], observe=observe)
    assert len(seen) == 6, "it is called no more"
    assert pipe.evaluate(state, batches[0]).version == BATCHES - 1
    resumed, metrics = pipe.step(state, models.copied(batches[-1]))  # the content counts, not the object
    assert (resumed.batch, sorted(metrics.losses)) == (BATCHES, [BATCHES - 1])
    running.check_equal(outcome(pipe, resumed, metrics), expected)
    with pytest.raises(InputError, match="already consumed it"):
        pipe.step(state, batches[-1])


def test_another_batch_completes_the_interrupted_step(pipe, fresh, start_state, batches, expected):
    """A loop `for batch in batches` that catches `KeyboardInterrupt` loses no batch and no loss."""
    state, metrics = models.copied(fresh), Metrics.empty()
    for t, batch in enumerate(batches):
        try:
            state, more = pipe.step(state, batch, observe=raising(KeyboardInterrupt())[0] if t in (0, 1) else None)
            metrics = interrupts.merged(metrics, more)
        except KeyboardInterrupt:
            continue
    assert (state.batch, sorted(metrics.losses)) == (BATCHES, list(range(BATCHES)))
    _, params = outcome(pipe, state, metrics)
    running.check_equal(params, expected[1])


def test_an_interrupted_drain_is_completed(pipe, start_state, batches, expected):
    state, metrics = pipe.step(models.copied(start_state), batches[-1])
    with pytest.raises(KeyboardInterrupt):
        pipe.drain(state, observe=raising(KeyboardInterrupt())[0])
    running.check_equal(outcome(pipe, state, metrics), expected)


class Broken(np.ndarray):
    """Rows on a disk that fails."""

    def __getitem__(self, rows):
        raise OSError("the disk is gone")


def test_a_batch_that_cannot_be_read_leaves_the_state_unchanged(pipe, start_state, batches, expected):
    state, (x, labels) = models.copied(start_state), batches[-1]
    with pytest.raises(OSError, match="the disk is gone"):
        pipe.step(state, (x, labels.view(Broken)))
    running.check_equal(outcome(pipe, *finish_training(pipe, state, batches)), expected)


@pytest.mark.parametrize("call", ["step", "drain"])
def test_a_computation_that_fails_loses_the_state_and_reports_it(pipe, start_state, batches, monkeypatch, call):
    def out_of_memory(*arguments):
        raise MemoryError("RESOURCE_EXHAUSTED: 7 bytes\nand more")

    state = models.copied(start_state)
    monkeypatch.setitem(interpreter._METHODS, interpreter.Update, out_of_memory)
    with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
        pipe.step(state, batches[-1]) if call == "step" else pipe.drain(state)
    monkeypatch.undo()
    assert pipe._executor._transport._mailbox == {}
    message = (
        r"state: lost: the step or drain that consumed it ended with MemoryError \(RESOURCE_EXHAUSTED: 7 bytes\) after overwriting "
        r"some of its arrays; continue from a checkpoint or snapshot \(Pipeline.restore\), or begin again with init"
    )
    for use in (lambda: pipe.step(state, batches[-1]), lambda: pipe.drain(state), lambda: pipe.params(state)):
        with pytest.raises(InputError, match=message):
            use()


def test_a_second_ctrl_c_after_some_seconds_does_not_wait(pipe, start_state, batches, monkeypatch):
    """Otherwise a step that waits for a lost process would never end."""
    state, update = models.copied(start_state), interpreter._METHODS[interpreter.Update]

    def pressed_again(*arguments):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(interrupts, "_PATIENCE", -1.0)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the last one was to end this")

    monkeypatch.setitem(interpreter._METHODS, interpreter.Update, pressed_again)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(state, batches[-1])
    monkeypatch.setitem(interpreter._METHODS, interpreter.Update, update)
    with pytest.raises(InputError, match="ended with KeyboardInterrupt after overwriting some of its arrays"):
        pipe.step(state, batches[-1])


def test_an_interrupted_evaluation_leaves_nothing(pipe, start_state, batches, expected, monkeypatch):
    state, evaluate = models.copied(start_state), interpreter._METHODS[interpreter.Compute]
    monkeypatch.setitem(interpreter._METHODS, interpreter.Receive, lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pipe.evaluate(state, batches[0])
    monkeypatch.undo()
    assert interpreter._METHODS[interpreter.Compute] is evaluate
    assert pipe._executor._transport._mailbox == {}
    running.check_equal(outcome(pipe, *finish_training(pipe, state, batches)), expected)


def test_signals_with_other_handlers_are_unchanged():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with interrupts.delayed_signals():
            with interrupts.delayed_signals():
                for _ in range(2):
                    signal.raise_signal(signal.SIGTERM)
                assert not received
            assert not received
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # who sets one in between keeps it
        assert received == [signal.SIGTERM] * 2, "each is delivered: a second one may mean more than the first"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with interrupts.delayed_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert previous is not signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_no_signal_is_delayed(pipe, start_state, batches, expected):
    """Python delivers signals to the main thread only."""
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(outcome(pipe, *finish_training(pipe, models.copied(start_state), batches))))
    thread.start()
    thread.join()
    running.check_equal(outcomes[0], expected)


def test_real_signals_at_random_moments(pipe, batches, fresh):
    state, pressed, armed = models.copied(fresh), 0, False

    def handle(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def press():
        rng = random.Random(0)
        while pressed < 25:
            time.sleep(rng.uniform(0, 0.01))
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=press)
    try:
        thread.start()
        while pressed < 25:
            try:
                armed = True
                while True:
                    state, _ = STEP(pipe, state, batches[state.batch % BATCHES])
            except KeyboardInterrupt:
                pressed += 1
    finally:
        armed, pressed = False, 25
        thread.join()
        signal.signal(signal.SIGINT, before)
    state, _ = pipe.step(state, batches[state.batch % BATCHES])  # the last one was perhaps interrupted: then this is its result
    again = models.copied(fresh)
    while again.batch < state.batch:
        again, _ = pipe.step(again, batches[again.batch % BATCHES])
    running.check_equal(pipe.params(pipe.drain(state)), pipe.params(pipe.drain(again)))
