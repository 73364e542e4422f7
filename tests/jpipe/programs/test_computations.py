"""What follows from the table of ops: no list of computations is written by hand, and each batch reports its results once."""

import itertools
import pathlib
import re
import typing

import jax
import pytest
from jpipe_train.report import stage_times

import jpipe
from jpipe import Plan
from jpipe.programs import _predict as predict
from jpipe.programs import _verify as verify
from jpipe.programs._instructions import COMPUTATIONS, OP_OF, Computation, Evaluate, Instruction, Load, Receive, parts
from jpipe.programs._steps import Steps
from jpipe.runtime import _interpreter as interpreter
from jpipe.runtime import _metrics
from jpipe.runtime._metrics import MetricsExchange
from jpipe.schedules import SCHEDULES, Op
from jpipe.schedules._schedule import PARTS
from jpipe.stages import _compile as compiled
from jpipe.viz import _draw as draw
from tests.jpipe import models
from tests.packages import PACKAGES

ROOT = pathlib.Path(__file__).parents[3]
INSTRUCTIONS = set(typing.get_args(Instruction))
AT_HOME = ("jpipe/programs/_instructions.py", "jpipe/runtime/_interpreter.py")  # where they are, and their methods


def test_every_table_of_ops_has_all_of_them():
    assert set(typing.get_args(Op)) == PARTS.keys() == COMPUTATIONS.keys()
    assert set(COMPUTATIONS.values()) == OP_OF.keys() == set(typing.get_args(Computation)) == compiled._COMPUTATIONS.keys()
    assert PARTS.keys() == draw._COLOURS.keys() == stage_times._KINDS.keys()
    assert {op for op, does in PARTS.items() if "F" in does and does != "F"} == draw._TURNS.keys()
    assert sorted(PARTS.values()) == ["F", "FI", "FIW", "I", "IW", "W"], "no two ops do the same, and parts are in their order"
    assert all(parts(kind(0, 0, 0)) == PARTS[op] for op, kind in COMPUTATIONS.items())
    assert parts(Load(0, 0, "inputs")) == ""


def test_every_table_of_instructions_has_all_of_them():
    assert verify._CHECKS.keys() == INSTRUCTIONS - {Evaluate}
    assert predict._HANDLERS.keys() == INSTRUCTIONS - {Evaluate, Receive}, "a receive takes no time of its own"
    assert interpreter._METHODS.keys() | {Load, interpreter.AllReduce} == INSTRUCTIONS


def test_no_module_lists_computations_by_hand():
    """Such a list was wrong whenever an op came that its writer had not thought of."""
    kinds = re.compile(rf"\b({'|'.join(kind.__name__ for kind in COMPUTATIONS.values())})\b")
    for path in (path for folder in PACKAGES.values() for path in folder.rglob("*.py")):
        if not path.as_posix().endswith(AT_HOME):
            code = re.sub(r'"""(.|\n)*?"""|#.*', "", path.read_text("utf-8"))
            assert not kinds.search(code), f"{path}: use `parts` of jpipe.programs._instructions"


REPLICAS = ([1, 1, 1], [1, 1, 2], [2, 1, 1], [2, 2, 2])
OPTIONS = ({}, {"update_every": "replicas"}, {"flush_first": 2}, {"noam": True})


def plans(depths, replicas, options):
    """Every schedule, with every option that changes in which computation a batch ends."""
    names = (*models.VARIANTS, *models.OTHERS)
    for name, d, split, own, more in itertools.product(names, depths, ("joint", "early"), replicas, options):
        fields = models.VARIANTS.get(name, {"schedule": name}) | {"split_backward": split, **more}
        chunks = {"v": 2, "looped": 2}.get(SCHEDULES[fields["schedule"]].layout, 1)
        fields |= {"num_stages": d * chunks, "microbatches": 2 * d, "replicas": own[:d] * chunks}
        fields |= {"layers": models.plain_stack(d * chunks).ids} | ({"chunks_per_rank": chunks} if chunks > 1 else {})
        if models.is_legal(**fields):
            yield Plan.even(**fields)


BATCHES = 5


def reported(plan, norm, drains):
    """The batches that have a loss, and those that have a norm, as steps and drains report them; each perhaps several times."""
    steps, exchange = Steps(plan, norm), MetricsExchange(plan, jax.devices()[:1] * len(plan.workers), None, norm, False)
    losses, norms, start = list[int](), list[int](), 0
    for batch in range(BATCHES + 1):
        for drain in [True, False] if batch in drains or batch == BATCHES else [False]:
            if (drain and start == batch) or (not drain and batch == BATCHES):
                continue
            program, shift = steps.program(batch - start, batch, drain)
            ended, updated = exchange._finished(program)
            losses += [t + shift for t in ended]
            norms += [t + shift for t in updated]
            start = batch if drain else batch + 1 if SCHEDULES[plan.schedule].flushes_after(plan, batch) else start
    return losses, norms


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])  # clipping, skipping batches and a dynamic loss scale need it
def test_each_batch_reports_once(norm):
    check_each_reports_once(norm, plans([2], ([1, 1], [1, 2]), [{}]))


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_each_batch_reports_once_with_every_option(norm):
    check_each_reports_once(norm, plans([1, 2, 3], REPLICAS, OPTIONS))


def check_each_reports_once(norm, some):
    once = list(range(BATCHES)), list(range(BATCHES))
    tried = {(plan, drains): reported(plan, norm, drains) for plan in some if may(plan, norm) for drains in (frozenset(), frozenset({2}))}
    assert len(tried) > 20
    assert [case for case, found in tried.items() if found != once] == []


def may(plan, norm):
    return not norm or not SCHEDULES[plan.schedule].norm_refusal(plan)


def test_a_loss_that_is_lost_is_an_error_of_ours(monkeypatch):
    """Neither `init` nor a step goes on where the list of what ends a batch lacks an op."""
    plan = Plan.even(models.plain_stack().ids, 2, schedule="pipedream_2bw", microbatches=2, split_backward="early")
    pipe = jpipe.Pipeline(models.plain_stack(), plan, models.squares, models.momentum(), clip_global_norm=1.0)
    batch = models.batches_of(1, 4)[0]
    state = pipe.init(jax.random.key(0), batch)
    monkeypatch.setattr(_metrics, "parts", lambda i: "" if OP_OF.get(type(i)) == "W" else parts(i))
    with pytest.raises(RuntimeError, match=r"internal error: expected the loss of the batches \[\] .* found \[0\]; please report"):
        pipe.step(state, batch)
    with pytest.raises(RuntimeError, match=r"internal error: expected the loss of the batches \[0, 1, .* found \[\]"):
        pipe.init(jax.random.key(0), batch)
