"""The table of ops: its rows, a new row, and consequences such as that each batch reports its results once."""

import dataclasses
import itertools
import typing

import jax
import numpy as np
import optax
import pytest

import jpipe
from jpipe import Plan
from jpipe.capabilities.registry import uses_of
from jpipe.ops import OPS, Op
from jpipe.plan import excluded
from jpipe.programs import _verify as verify
from jpipe.programs._instructions import CoreInstruction, Load
from jpipe.programs._steps import Steps
from jpipe.programs.lowering import Run
from jpipe.programs.prediction import _actions as actions
from jpipe.runtime import _interpreter as interpreter
from jpipe.schedules import SCHEDULES
from jpipe.stages.functions._stage_functions import StageFunctions
from jpipe.viz import _draw as draw
from tests.grid import parse_grid
from tests.jpipe import models

INSTRUCTIONS = set(typing.get_args(CoreInstruction))


def test_each_op_reads_what_an_op_leaves_and_is_drawn():
    left = {kind for op in OPS.values() for kind in op.leaves} | {"inputs"}
    for name, op in OPS.items():
        assert (op.name, op.reads in left) == (name, True)
        assert set(op.pieces) <= draw._COLOURS.keys() & OPS.keys(), "the ops that it consists of have a colour, and are ops"
        assert "".join(OPS[piece].parts for piece in op.pieces) == op.parts, "its pieces do what it does"
        assert sum(kind in ("residuals", "stash") for kind in op.leaves) == (op.trains and not op.finishes), "until it is finished"
        assert ("state" in op.leaves) == (op.begins and op.trains)
    assert sorted(op.parts for op in OPS.values() if op.trains) == ["F", "FI", "FIW", "I", "IW", "W"], "no two do the same"


@pytest.mark.slow
def test_a_new_op_is_a_row_and_a_stage_function(monkeypatch):
    """With a backward that sends twice the gradient, the previous stage learns as with twice the learning rate."""

    def backward_doubled(self, *arguments):
        (gradient, weight), accumulators = self.backward(*arguments)
        return ([2 * leaf for leaf in gradient], weight), accumulators

    monkeypatch.setattr(StageFunctions, "backward_doubled", backward_doubled, raising=False)
    monkeypatch.setitem(OPS, "D", Op("D", "backward_doubled", "residuals", ("gradient", "accumulators"), "backward, doubled"))
    stack, (batch,) = models.plain_stack(), models.batches_of(1, 4)

    def trained(op, rate):
        plan = Plan.even(stack.ids, 2, "auto_zero_bubble", 2, order=["F0.0 F0.1 B0.0 B0.1", f"F1.0 F1.1 {op}1.0 {op}1.1"])
        pipe, tracer = jpipe.Pipeline(stack, plan, models.squares, optax.sgd(rate)), jpipe.Tracer(plan)
        state, _ = pipe.step(pipe.init(jax.random.key(0), batch), batch, observe=tracer)
        return plan, pipe.params(state), tracer.finish().timeline

    plan, doubled, timeline = trained("D", 0.125)
    once, twice = (trained("B", rate)[1] for rate in (0.125, 0.25))
    for layers, expected in zip((stage.layers for stage in plan.stages), (twice, once), strict=True):
        jax.tree.map(np.testing.assert_array_equal, [doubled[i] for i in layers], [expected[i] for i in layers])
    predicted = jpipe.simulate(jpipe.lower(plan, 1))
    assert parse_grid(predicted.grid()) == predicted.timeline
    assert [span.op for span in timeline[1]] == [span.op for span in predicted.timeline[1]] == ["F", "F", "D", "D"]
    assert jpipe.runtime.fit_costs([jpipe.programs.StageCost()] * 2, predicted.timeline)[1].backward == 2.0
    jpipe.draw_timeline({"predicted": predicted.timeline, "measured": timeline})
    assert '"D0.0"' in jpipe.to_perfetto({"measured": timeline})


def test_every_table_of_instructions_has_all_of_them():
    assert verify._CHECKS.keys() == INSTRUCTIONS
    assert actions.WRITERS.keys() == INSTRUCTIONS
    assert interpreter._METHODS.keys() | {Load, interpreter.AllReduce} == INSTRUCTIONS


REPLICAS = ([1, 1, 1], [1, 1, 2], [2, 1, 1], [2, 2, 2])
OPTIONS = ({}, {"update_every": "replicas"}, {"flush_first": 2})


def plans(depths, replicas, options):
    """Yield every schedule with every option that changes which computation ends a batch."""
    names = (*models.VARIANTS, *models.WITHOUT_VARIANTS)
    for name, d, split, replica_counts, more in itertools.product(names, depths, ("joint", "early"), replicas, options):
        fields = models.VARIANTS.get(name, {"schedule": name}) | {"split_backward": split, **more}
        chunks = {"v": 2, "looped": 2}.get(SCHEDULES[fields["schedule"]].layout, 1)
        fields |= {"num_stages": d * chunks, "microbatches": 2 * d, "replicas": replica_counts[:d] * chunks}
        fields |= {"layers": models.plain_stack(d * chunks).ids} | ({"chunks_per_rank": chunks} if chunks > 1 else {})
        if models.is_legal(**fields):
            yield Plan.even(**fields)


BATCHES = 5


def reported(plan, norm, drains):
    """Return the batches whose losses, and those whose norms, steps and drains report, with any repetitions."""
    steps = Steps(plan, uses_of(global_norm=norm))
    losses, norms, start = list[int](), list[int](), 0
    for batch in range(BATCHES + 1):
        for drain in [True, False] if batch in drains or batch == BATCHES else [False]:
            if (drain and start == batch) or (not drain and batch == BATCHES):
                continue
            program, shift = steps.program(batch - start, batch, drain)
            losses += [t + shift for t in program.ended]
            norms += [t + shift for t in program.updated[-1]]
            start = batch if drain else batch + 1 if SCHEDULES[plan.schedule].flushes_after(plan, batch) else start
    return losses, norms


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])  # clipping, skipping batches and a dynamic loss scale need it
def test_each_batch_reports_once(norm):
    check_each_reports_once(norm, plans([2], ([1, 1], [1, 2]), [{}]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["", "norm"])
def test_each_batch_reports_once_with_every_option(norm):
    check_each_reports_once(norm, plans([1, 2, 3], REPLICAS, OPTIONS))


def check_each_reports_once(norm, some):
    once = list(range(BATCHES)), list(range(BATCHES))
    tried = {(plan, drains): reported(plan, norm, drains) for plan in some if may(plan, norm) for drains in (frozenset(), frozenset({2}))}
    assert len(tried) > 20
    assert [case for case, reports in tried.items() if reports != once] == []


def may(plan, norm):
    return not norm or not excluded(plan, skip_nonfinite=True)


def test_a_missing_loss_is_an_internal_error(monkeypatch):
    """`init` and `step` raise an error if the lowering does not note what ends a batch."""
    plan = Plan.even(models.plain_stack().ids, 2, schedule="pipedream_2bw", microbatches=2, split_backward="early")
    pipe, fresh = (jpipe.Pipeline(models.plain_stack(), plan, models.squares, models.momentum(), clip_global_norm=1.0) for _ in range(2))
    batch, program = models.batches_of(1, 4)[0], Steps.program
    state = pipe.init(jax.random.key(0), batch)
    monkeypatch.setattr(Steps, "program", lambda *step: (dataclasses.replace(program(*step)[0], ended=range(0)), 0))
    with pytest.raises(RuntimeError, match=r"internal error: expected the loss of the batches \[\] .* found \[0\]; please report"):
        pipe.step(state, batch)
    monkeypatch.setattr(Run, "ended", lambda run: 0)
    with pytest.raises(RuntimeError, match=r"internal error: expected the loss of the batches \[0, 1, .* found \[\]"):
        fresh.init(jax.random.key(0), batch)
