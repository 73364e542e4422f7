"""The costs of runs of layers as stages, from prefix sums, for all recomputation policies together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import jpipe
from jpipe.plan import repeats_forward
from jpipe_planner.cost.memory import temporary_bytes
from jpipe_planner.profile.profile import SHARED, Profile

_ONCE = ("update", "state", *SHARED)  # fields that do not depend on the microbatch size


@dataclass(frozen=True)
class Stages:
    """Costs of stages, counted as in `jpipe.programs.sum_layer_costs`: NumPy arrays over the stages, some with a first axis of policies.

    Attributes:
        forward: seconds per microbatch, including dispatch.
        backward: seconds per microbatch, by policy, including recomputation and dispatch.
        fusing: the time of forward and backward as one program, divided by the time of both.
        update: seconds of an update, including dispatch.
        weights, frozen, accumulators, optimizer, state, inputs, outputs, labels: bytes, as in `jpipe.programs.StageCost`.
        ahead: bytes of the prediction of `delay_correction`, see `stage_bytes`.
        residuals, temporary: the same, by policy.
        fused: bytes of scratch memory, including residuals, if forward and backward are one program.
        exchanged: bytes of this and other stages' gradients of shared parameters that a stage holds to exchange them.
        sent: bytes of gradients of shared parameters that a stage sends to other stages.
    """

    forward: Any
    backward: Any
    fusing: Any
    update: Any
    weights: Any
    frozen: Any
    accumulators: Any
    optimizer: Any
    ahead: Any
    state: Any
    inputs: Any
    outputs: Any
    labels: Any
    residuals: Any
    temporary: Any
    fused: Any
    exchanged: Any = 0
    sent: Any = 0


class Layers:
    """The numbers of a profile as arrays. All layers have residuals for `policies`, in the order in which they are tried."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self.count = profile, len(profile.layers)
        at = [one for layer in profile.layers for one in layer.at]
        known = set.intersection(*(set(one.residuals) for one in at)) & set(jpipe.plan.RECOMPUTE) - {"none", "full"}
        size = {policy: sum(one.residuals[policy] for one in at) for policy in known}
        self.policies = ("none", *sorted(known, key=lambda policy: (repeats_forward(policy), -size[policy], policy)), "full")
        self.repeats = np.array([float(repeats_forward(policy)) for policy in self.policies])
        self._once = {name: _sums([getattr(layer, name) for layer in profile.layers]) for name in _ONCE}
        self._unknown_full = _sums([int(any("full" not in one.residuals for one in layer.at)) for layer in profile.layers])
        # Arrays by size, with the sum over the layers before each layer, unless a comment says otherwise.
        times = ("forward", "backward", "in_one_program", "repeated")
        self._forward, self._backward, self._in_one, self._again = (_sums(self._by_size(name)) for name in times)
        self._more, self._further = (_sums(self._by_size(name)) for name in ("temporary_more", "remaking_more"))
        self._following, self._scratch = self._by_size("remaking_next"), self._by_size("temporary")  # no sums
        remaking = [[layer.at[n].remaking for layer in profile.layers] for n in range(len(profile.sizes))]
        self._remaking = [None if None in one else np.array(one) for one in remaking]  # no sums
        # bytes before each layer and after the last one; no sums
        self._crossing = np.concatenate([np.array(profile.inputs)[:, None], self._by_size("outputs")], axis=1)
        residuals, self._shared = (self._by_policy(name) for name in ("residuals", "shared"))  # shared with the next layer; no sums
        self._residuals = _sums(residuals - self._shared)

    def _by_size(self, name: str) -> Any:
        """Return the field `name` of each layer at each size."""
        layers, sizes = self._profile.layers, range(len(self._profile.sizes))
        return np.array([[getattr(layer.at[n], name) for layer in layers] for n in sizes])

    def _by_policy(self, name: str) -> Any:
        """Return the bytes in the field `name` of each layer at each size with each recomputation policy; 0 if they are not known."""
        layers, sizes = self._profile.layers, range(len(self._profile.sizes))
        return np.array([[[getattr(layer.at[n], name).get(policy, 0) for layer in layers] for policy in self.policies] for n in sizes])

    def work(self, rows: int, repeats: int) -> list[float]:
        """Return for each layer the seconds of a forward, a backward and `repeats` repeated forwards, without dispatch."""
        n = self._profile.sizes.index(rows)
        return np.diff((1 + repeats) * self._forward[n] + self._backward[n]).tolist()

    def runs(self, first: Any, end: Any, rows: int) -> Stages:
        """Return the stages from each `first` layer up to each `end` at a size of the profile; shared parameters count for each layer."""
        n, dispatch, last, is_last = self._profile.sizes.index(rows), self._profile.dispatch, end - 1, end == self.count
        once = {name: sums[end] - sums[first] for name, sums in self._once.items()}
        before = np.maximum(last - 1, first)
        inputs = self._crossing[n, first]
        times = self._forward, self._backward, self._in_one, self._again
        forward, backward, in_one, again = (sums[n, end] - sums[n, first] for sums in times)
        apart = forward + backward + 2 * dispatch
        residuals = self._residuals[n][:, end] - self._residuals[n][:, first] + self._shared[n][:, last]
        residuals[-1] = np.where(self._unknown_full[end] > self._unknown_full[first], inputs, residuals[-1])
        scratch, everything = _most(self._scratch[n], first, end) + self._more[n, last] - self._more[n, first], None
        if (remaking := self._remaking[n]) is not None:
            more = self._following[n, before] + self._further[n, before] - self._further[n, first]
            everything = remaking[last] + np.where(last > first, more, 0)
        return Stages(
            forward=forward + dispatch,
            backward=backward + np.multiply.outer(self.repeats, again) + dispatch,
            fusing=np.divide(in_one + dispatch, apart, out=np.ones_like(forward), where=apart > 0),
            inputs=inputs,
            outputs=np.where(is_last, 0, self._crossing[n, end]),
            labels=np.where(is_last, self._profile.labels[n], 0),
            residuals=residuals,
            temporary=temporary_bytes(scratch, everything, residuals[0], residuals, inputs),
            fused=temporary_bytes(scratch, everything, residuals[0], 0, inputs),
            **(once | {"update": once["update"] + dispatch}),
        )

    def cut(self, starts: Sequence[int], rows: int) -> Stages:
        """Return the stages with these first layers, at a size of the profile. A shared parameter counts once in each stage that has it."""
        first = np.array(starts)
        stages = self.runs(first, np.append(first[1:], self.count), rows)
        if not self._profile.shared:
            return stages
        sizes: dict[str, Any] = {name: getattr(stages, name) for name in SHARED}
        exchanged = sent = np.zeros_like(first)
        for parameter in self._profile.shared:
            uses = np.add.reduceat([int(layer_id in parameter.layers) for layer_id in self._profile.ids], first)
            sizes = {name: size - np.maximum(uses - 1, 0) * getattr(parameter, name) for name, size in sizes.items()}
            holders = np.count_nonzero(uses)
            size = np.where((uses > 0) & (holders > 1), parameter.accumulators, 0)  # 0 of a frozen one
            exchanged, sent = exchanged + holders * size, sent + (holders - 1) * size
        return replace(stages, exchanged=exchanged, sent=sent, **sizes)


def _most(values: Any, i: Any, j: Any) -> Any:
    """Return the maximum of values[i:j], for arrays of i < j."""
    ends = np.stack([i, j], -1)
    return np.maximum.reduceat(np.append(values, 0), ends.ravel())[::2].reshape(i.shape)  # every other one is of what lies between


def _sums(values: Any) -> Any:
    """Return along the last axis the sum of the values before each value, and at the end the sum of all values."""
    sums = np.cumsum(values, -1)
    return np.concatenate([np.zeros_like(sums[..., :1]), sums], -1)
