"""Costs of the stages of a cut, for all recomputation policies together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import jpipe
from jpipe.plan import repeats_forward
from jpipe_planner.cost.memory import temporary_bytes
from jpipe_planner.profile.profile import Profile


@dataclass(frozen=True)
class Stages:
    """Costs by stage, counted as in `jpipe.programs.sum_layer_costs`: NumPy arrays over the stages, some with a first axis of policies.

    Attributes:
        starts: the first layer of each stage.
        forward: seconds per microbatch, including dispatch.
        backward: the same, by policy, including recomputation.
        update: seconds, including dispatch.
        weights: bytes of one version.
        frozen: the part of `weights` that all versions share.
        accumulators: bytes of accumulated gradients.
        optimizer: bytes.
        ahead: bytes, see `stage_bytes`.
        state: bytes.
        inputs: bytes of one microbatch.
        outputs: bytes that cross the cut; 0 at the last stage.
        labels: bytes; 0 except at the last stage.
        residuals: bytes of one microbatch, by policy.
        temporary: bytes, by policy.
        fused: temporary bytes of a stage whose forward and backward are one program; then its residuals are among them.
        exchanged: bytes of shared gradients that a stage holds for the exchange: its own and those of the other stages.
        sent: bytes of shared gradients that it sends to other stages.
    """

    starts: tuple[int, ...]
    forward: Any
    backward: Any
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
    exchanged: Any
    sent: Any


class Layers:
    """The numbers of a profile as arrays, and the recomputation policies for which all its layers have residuals, in the order of trial."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        at = [[layer.at[n] for layer in profile.layers] for n in range(len(profile.sizes))]
        known = set.intersection(*(set(one.residuals) for row in at for one in row)) & set(jpipe.plan.RECOMPUTE) - {"none", "full"}
        residual_bytes = {policy: sum(one.residuals[policy] for row in at for one in row) for policy in known}
        self.policies = ("none", *sorted(known, key=lambda policy: (repeats_forward(policy), -residual_bytes[policy], policy)), "full")
        self._full_known = np.array([all("full" in one.residuals for one in layer.at) for layer in profile.layers])
        self.forward = np.array([[one.forward for one in row] for row in at])
        self.backward = np.array([[one.backward for one in row] for row in at])
        self._outputs = np.array([[one.outputs for one in row] for row in at])
        self._temporary = np.array([[one.temporary for one in row] for row in at])
        self._more = np.array([[one.temporary_more for one in row] for row in at])
        self._remaking = None
        if all(one.remaking is not None for row in at for one in row):
            self._remaking = np.array([[one.remaking for one in row] for row in at])
        self._remaking_next = np.array([[one.remaking_next for one in row] for row in at])
        self._remaking_more = np.array([[one.remaking_more for one in row] for row in at])
        self._residuals, self._shared = (
            np.array([[[getattr(one, name).get(policy, 0) for one in row] for row in at] for policy in self.policies])
            for name in ("residuals", "shared")
        )

    @cached_property
    def _once(self) -> dict[str, Any]:
        """The parts that do not depend on the microbatch size."""
        names = ("update", "weights", "frozen", "accumulators", "optimizer", "ahead", "state")
        return {name: np.array([getattr(layer, name) for layer in self._profile.layers]) for name in names}

    def _summed(self, first: Any) -> dict[str, Any]:
        """Sum the parts that do not depend on the microbatch size by stage, with each shared parameter once in a stage."""
        sums = {name: np.add.reduceat(values, first) for name, values in self._once.items()}
        sums["exchanged"] = sums["sent"] = np.zeros_like(first)
        for parameter in self._profile.shared:
            uses = np.add.reduceat([int(layer_id in parameter.layers) for layer_id in self._profile.ids], first)
            for name in ("weights", "frozen", "accumulators", "optimizer", "ahead"):
                sums[name] = sums[name] - np.maximum(uses - 1, 0) * getattr(parameter, name)
            holders = np.count_nonzero(uses)
            sizes = np.where((uses > 0) & (holders > 1), parameter.accumulators, 0)  # 0 of a frozen one
            sums["exchanged"], sums["sent"] = sums["exchanged"] + holders * sizes, sums["sent"] + (holders - 1) * sizes
        return sums

    def cut(self, starts: Sequence[int], n: int) -> Stages:
        """Return the stages of a cut for the n-th microbatch size of the profile.

        Args:
            starts: the first layer of each stage.
            n: index of the size.
        """
        first, profile = np.array(starts), self._profile
        inputs = np.append(profile.inputs[n], self._outputs[n, first[1:] - 1])
        labels = np.zeros_like(inputs)
        labels[-1] = profile.labels[n]
        shared = self._shared[:, n]
        residuals = np.add.reduceat(self._residuals[:, n] - shared, first, axis=-1) + shared[:, np.append(first[1:], 0) - 1]
        residuals[-1] = np.where(np.logical_and.reduceat(self._full_known, first), residuals[-1], inputs)
        last = np.append(first[1:], len(profile.layers)) - 1
        everything = None
        if self._remaking is not None:
            everything = self._remaking[n, last] + _before_last(self._remaking_next[n], self._remaking_more[n], first, last)
        forward = np.add.reduceat(self.forward[n], first)
        backward = np.add.reduceat(self.backward[n], first)
        scratch = np.maximum.reduceat(self._temporary[n], first) + np.add.reduceat(self._more[n], first) - self._more[n, last]
        recomputation = np.array([float(repeats_forward(policy)) for policy in self.policies])[:, None] * forward
        once = self._summed(first)
        return Stages(
            starts=tuple(starts),
            forward=forward + profile.dispatch,
            backward=backward + recomputation + profile.dispatch,
            inputs=inputs,
            outputs=np.append(inputs[1:], 0),
            labels=labels,
            residuals=residuals,
            temporary=temporary_bytes(scratch, everything, residuals[0], residuals, inputs),
            fused=temporary_bytes(scratch, everything, residuals[0], 0, inputs),
            **(once | {"update": once["update"] + profile.dispatch}),
        )


def _before_last(following: Any, more: Any, first: Any, last: Any) -> Any:
    """Sum by stage the value in `following` of its last layer but one, and those in `more` of the layers before."""
    sums, several = np.concatenate([[0], np.cumsum(more)]), last > first
    before = np.maximum(last - 1, first)
    return np.where(several, following[before] + sums[before] - sums[first], 0)
