"""Parallel pipelines that agree rarely (DiLoCo): when their stages agree, and how the agreed weights move.

Replica k of each stage belongs to pipeline k of w. Each pipeline makes its updates only from its own microbatches, in the order of the
schedule, with its own optimizer state; no gradients are summed. All counts begin at 0; update u makes version u + 1. The number of an
agreement is the number of the update after which it begins.

    begins      after update u of stage s, if (u + 1 - o_s) mod H = 0
    changes     D_k = A - W_k: the agreed weights A of the last agreement (at first the initial weights) minus version u + 1 of pipeline k
    mean        D = (D_0 + … + D_{w-1}) / w, each pipeline counting once, whatever the weights of its microbatches
    outer step  V = D + μ V, A = A - η (D + μ V): SGD with Nesterov's momentum; V begins with zeros
    applied     after update u + τ, between that update and the first forward that reads version u + τ + 1: this version becomes A if τ = 0,
                otherwise α W_k + (1 - α) A with W_k what it was; the next update of each pipeline starts from it

Order: update u, then the agreement, then everything that reads version u + 1, including update u + 1. With a delay τ the pipelines continue
from their own weights while the mean is computed, and apply the result τ updates later. τ < H, so an agreement ends before the next one
begins. An agreement changes only the newest version: versions that microbatches in flight have read do not change until their backwards are
done. So a late gradient (PipeDream, PipeDream-2BW) is applied to the agreed weights, like to any newer version. Each pipeline always keeps
its own optimizer state.

If all stages agree at once, o_s is 0. With F fragments of consecutive stages, stage s of d is in fragment f = floor(s F / d), and o_s =
floor(f H / F): each stage agrees every H updates, and different fragments agree after different updates. The first round of a fragment with
o_s > 0 has o_s updates. Fragments and a delay together are Streaming DiLoCo; α is its mixing factor.

In few bits each pipeline sends integers to all others, and keeps what rounding has lost for its next agreement (error feedback, as in
MuLoCo). E_k begins with zeros, and replaces the mean above:

    sent        C_k = round(D_k + E_k), E_k = D_k + E_k - C_k; 0 where this is not finite
    mean        D = (C_0 + C_1 + ...) / w; each pipeline adds in this order, so all get the same bits

An array is rounded in blocks of 256 neighbouring values x with the largest magnitude M. With 4 bits the integers q are x / (M / 7), rounded
to the nearest of -7 to 7; with 2 bits x / (0.44 M), to the nearest of -1 to 1. A block arrives as s q, where s = (x . q) / (q . q), as
float32, makes the sum of squared errors least. So no block arrives further from x than zeros would. A block with NaN or infinity arrives as
NaN.

Evaluations and exports use the agreed weights of the last agreement that has begun, even if it is not applied yet. With H = 1, η = 1, μ =
0, SGD and microbatches of equal weight this is data parallelism. References: DiLoCo (arXiv:2311.08105), algorithm 1; Streaming DiLoCo
(arXiv:2501.18512); MuLoCo (arXiv:2505.23725), which has 2 bits with Muon.
"""

import reprlib
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
from pydantic import Field

from jpipe._numbers import Float, Int, as_python
from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError

if TYPE_CHECKING:
    import jpipe

_MIXING = 0.5
SHARING_SCALE = 256
"""The number of values that share a scale."""


class OuterOptimizer(pydantic.BaseModel):
    """The optimizer that moves the agreed weights of parallel pipelines. Its gradient is the mean of the pipelines' changes.

    Attributes:
        optimizer: "nesterov", which is SGD with Nesterov's momentum.
        learning_rate: the learning rate, 0.7 by default, as in DiLoCo. With 1, and without momentum, the agreed weights are the mean of the
            pipelines' weights.
        momentum: the momentum, at least 0 and below 1, 0.9 by default. With 0 no momentum is kept.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    optimizer: Literal["nesterov"] = "nesterov"
    learning_rate: Annotated[Float, Field(gt=0, le=100, allow_inf_nan=False)] = 0.7
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.9


class Agreement(pydantic.BaseModel):
    """When the parallel pipelines of a plan agree on their weights, and how.

    Attributes:
        every: H, the number of updates of each stage from one agreement to the next, 1 or more.
        outer: the optimizer that moves the agreed weights.
        fragments: None, the default: all stages agree after the same update. "stages": the stages agree one after the other, spread over
            the H updates. A number: the stages are divided into this number of fragments of consecutive stages, which agree one after the
            other; at most the number of stages.
        delay: τ, the number of updates after which an agreement is applied, below `every`; in the meantime the pipelines continue from
            their own weights. 0, the default: a stage waits for the agreement.
        mixing: α, the share of its own weights that a pipeline keeps when it applies an agreement late, at least 0 and below 1; 0.5 by
            default. Not used without a delay.
        bits: None, the default: pipelines sum their changes as they are. 4 or 2: they send them in this many bits for each value, with
            error feedback.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    every: Annotated[Int, Field(ge=1, le=10**9)]
    outer: OuterOptimizer = OuterOptimizer()
    fragments: Literal["stages"] | Annotated[Int, Field(ge=1)] | None = None
    delay: Annotated[Int, Field(ge=0)] = 0
    mixing: Annotated[Float, Field(ge=0, lt=1)] = _MIXING
    bits: Literal[4, 2] | None = None

    @pydantic.field_validator("fragments", mode="before")
    @classmethod
    def _stages_or_count(cls, value: object) -> object:
        count = as_python(value)
        if count not in (None, "stages") and not (type(count) is int and count >= 1):
            raise ValueError(f"expected 'stages', a number of 1 or more, or null, found {reprlib.repr(value)}")
        return count

    @pydantic.model_validator(mode="after")
    def _is_applied_in_time(self) -> "Agreement":
        if self.delay >= self.every:
            expected = f"less than every, {self.every}, because an agreement is applied before the next one begins"
            raise InputError(key="delay", expected=expected, found=self.delay)
        if not self.delay and self.mixing != _MIXING:
            raise InputError(key="mixing", expected="no value if delay is not set", found=self.mixing, change="remove mixing, or set delay")
        return self

    def sent_share(self, pipelines: int) -> float:
        """Return the bytes that each pipeline sends to agree, in a ring or to each other pipeline, as a share of its float32 weights."""
        others = pipelines - 1
        return 2 * others / pipelines if self.bits is None else others * (self.bits + 32 / SHARING_SCALE) / 32

    def last(self, s: int, depth: int, updates: int) -> int:
        """Return the version at which stage s last began an agreement before its update number `updates`; 0 if there was none.

        Args:
            s: the stage.
            depth: the number of stages.
            updates: the number of updates that the stage has made.
        """
        fragments = depth if self.fragments == "stages" else self.fragments or 1
        offset = s * fragments // depth * self.every // fragments
        return max(updates - (updates - offset) % self.every, 0)


def agrees(plan: "jpipe.Plan", s: int, update: int) -> bool:
    """Return whether parallel pipelines begin to agree on the weights of stage s after this update, counted from 0."""
    return plan.agree is not None and plan.agree.last(s, plan.depth, update + 1) == update + 1


def agreement_applied(plan: "jpipe.Plan", s: int, update: int) -> int | None:
    """Return the agreement that stage s applies after an update, or None. Its number is the update after which it began."""
    begun = update - (0 if plan.agree is None else plan.agree.delay)
    return begun if begun >= 0 and agrees(plan, s, begun) else None


def agreement_under_way(plan: "jpipe.Plan", s: int, updates: int) -> int | None:
    """Return the agreement that stage s has begun but not applied after `updates` updates, or None."""
    if plan.agree is None:
        return None
    begun = plan.agree.last(s, plan.depth, updates) - 1
    return begun if begun >= 0 and begun + plan.agree.delay >= updates else None


def check(plan: "jpipe.Plan") -> None:
    """Check that the replicas of a plan can be parallel pipelines that agree on their weights."""
    assert plan.agree is not None
    if len(set(plan.replicas)) > 1 or plan.replicas[0] == 1:
        expected = "the same number of replicas for each stage, 2 or more, which form parallel pipelines"
        raise InputError(key="agree", expected=expected, found=list(plan.replicas), change="give all stages this number, or remove agree")
    if plan.agree.bits and (meshes := [stage.shape for stage in plan.stages if stage.shape]):
        found = f"{plan.agree.bits} and a mesh {dict(meshes[0])}"
        raise InputError(key="agree.bits", expected="stages on one device each", found=found, change="remove bits, or the mesh")
    if isinstance(plan.agree.fragments, int) and plan.agree.fragments > plan.depth:
        expected = f"'stages', or a number of fragments up to the number of stages, {plan.depth}"
        raise InputError(key="agree.fragments", expected=expected, found=plan.agree.fragments, change="a stage is in one fragment")


_OWN_GRADIENTS = "pipelines that agree sum no gradients"
_NORM = "each pipeline needs its own norm, but without a flush there is only one norm per batch"

EXCLUSIONS = (
    Exclusion("stages.sum_parts", "agree", _OWN_GRADIENTS),
    Exclusion("links.sums", "agree", _OWN_GRADIENTS),
    Exclusion("agree", "shard_optimizer", "each pipeline has its own optimizer state"),
    Exclusion("agree", "update_every", "each pipeline makes one update per batch", "change it, or remove agree"),
    Exclusion(
        "clip_global_norm",
        "agree",
        _NORM,
        "use a schedule that flushes, or clip_stage_norm, which clips each stage by the stage's norm",
        without_flush=True,
    ),
    Exclusion("skip_nonfinite", "agree", _NORM, "use a schedule that flushes, or remove one of them", without_flush=True),
    Exclusion("precision: loss_scale: dynamic", "agree", "each pipeline would need its own scale"),
    Exclusion(
        "precision: params",
        "agree",
        "an agreement moves the weights, but not the float32 copies that the optimizer updates",
        "use compute 'bfloat16' with params 'float32', or remove plan.agree",
    ),
    Exclusion("ema_decay", "agree", "each pipeline would average its own weights instead of the agreed weights"),
    Exclusion("delay_correction", "agree", "the pipelines would agree on predicted weights"),
    Exclusion(
        "ties",
        "agree",
        "without a flush pipelines sum the gradients of shared parameters too late, and fragments would agree on each copy separately",
        "put the layers that share a parameter into one stage, or remove one of them",
    ),
)
"""The options that cannot be combined with pipelines that agree."""

OPTION = Option(
    room="agreement",
    field="agree",
    check=check,
    exclusions=EXCLUSIONS,
    parallel_pipelines=True,
)
