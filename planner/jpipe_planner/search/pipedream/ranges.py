"""Costs of any run of layers as one stage, from prefix sums, for arrays of runs."""

from typing import Any

import numpy as np

from jpipe_planner.cost.devices import Kind
from jpipe_planner.cost.memory import stage_bytes, temporary_bytes
from jpipe_planner.cost.price import Number, all_reduce_seconds, stage_seconds
from jpipe_planner.search.pipedream.partition import Problem

_ENOUGH = 2**50  # bytes or waiting inputs: in effect no limit


class Ranges:
    """The runs [i, j) of a problem's layers.

    Attributes:
        outputs: bytes that cross the cut before each layer; 0 before the first layer and after the last one, which are not cuts.
        replicas: the numbers of replicas that a stage can have, ascending.
    """

    def __init__(self, problem: Problem) -> None:
        layers, self._problem = problem.layers, problem
        self.count = len(layers)
        self.outputs = np.array([0, *(layer.outputs for layer in layers[:-1]), 0])
        self._inputs = np.array([problem.inputs, *(layer.outputs for layer in layers)])
        devices, every = problem.topology.num_devices, problem.microbatches
        self.replicas = np.array([r for r in range(1, devices + 1) if every == "replicas" or every % r == 0])
        self._forward = _sums([layer.forward for layer in layers])
        self._compute = _sums([layer.forward + layer.backward for layer in layers])
        self._update = _sums([layer.update for layer in layers])
        self._weights = _sums([layer.trained for layer in layers])
        self._summed = _sums([layer.summed for layer in layers])
        self._optimizer = _sums([layer.optimizer for layer in layers])
        self._ahead = _sums([layer.ahead for layer in layers])
        self._state = _sums([layer.state + layer.frozen for layer in layers])
        self._temporary = _Most([layer.temporary for layer in layers])
        self._more = _sums([layer.temporary_more for layer in layers])
        is_known = all(layer.remaking is not None for layer in layers)
        self._remaking = np.array([layer.remaking for layer in layers]) if is_known else None
        self._remaking_next = np.array([layer.remaking_next for layer in layers])
        self._remaking_more = _sums([layer.remaking_more for layer in layers])
        self._residuals = {
            policy: (_sums([layer.residuals.get(policy, 0) for layer in layers]), _sums([layer.shared.get(policy, 0) for layer in layers]))
            for policy in {"none", *problem.policies} - {"full"}
        }

    def compute(self, recompute: bool) -> Any:
        """Return the seconds of forward and backward of the layers before each one."""
        return self._compute + self._forward if recompute else self._compute

    def seconds(self, i: Number, j: Number, replicas: Number, kind: Kind, recompute: bool) -> Number:
        """Return the seconds per microbatch of the stage [i, j) on a range of devices of a kind."""
        problem = self._problem
        compute = self._compute[j] - self._compute[i] + 2 * problem.dispatch
        if recompute:
            compute = compute + (self._forward[j] - self._forward[i])
        update = self._update[j] - self._update[i] + problem.dispatch
        summed = all_reduce_seconds(self._summed[j] - self._summed[i], replicas, kind.link)
        every = replicas if problem.microbatches == "replicas" else problem.microbatches
        return stage_seconds(kind.slowness * compute, kind.slowness * update, summed, replicas, every)

    def ends(self, bound: float, replicas: Any, kind: Kind, recompute: bool) -> Any:
        """Return one past the last layer of a stage of at most `bound` seconds, or slightly more, by `replicas` and first layer.

        A stage takes the larger of two sums over its layers: computing, and summing gradients after all microbatches except one. Each sum
        is looked up among those of all layers. The bound is slightly wider, because another order of summation rounds differently.
        """
        problem, layers = self._problem, np.arange(self.count + 1)
        every = replicas if problem.microbatches == "replicas" else np.full_like(replicas, problem.microbatches)
        summing = (all_reduce_seconds(size, replicas, kind.link) for size in (0, 1))
        delay, with_a_byte = (np.broadcast_to(seconds, replicas.shape) for seconds in summing)
        compute, update, dispatch = (kind.slowness * part for part in (self.compute(recompute), self._update, problem.dispatch))
        ends = np.empty((len(replicas), self.count + 1), np.int64)
        for row, (m, r) in enumerate(zip(every.tolist(), replicas.tolist(), strict=True)):
            microbatches_per_replica, fixed = m / r, dispatch * (1 + 2 * m / r)
            computing = microbatches_per_replica * compute + update
            waiting = computing - compute + (with_a_byte[row] - delay[row]) * self._summed
            for total, constant in ((computing, fixed), (waiting, fixed - 2 * dispatch + delay[row])):
                most = (bound * m - constant) + 1e-9 * (total[-1] + abs(constant))
                end = np.searchsorted(total, total + most, side="right") - 1
                ends[row] = end if total is computing else np.minimum(ends[row], end)
        return np.maximum(ends, layers)

    def room(
        self,
        i: Number,
        j: Number,
        replicas: Number,
        in_flight: Number,
        policy: str,
        memory: Number,
        *,
        gradients: Number = 0,
        relaxed: bool = False,
    ) -> Number:
        """Return how many inputs can wait at a device of the stage [i, j), within `memory`; negative: it does not fit.

        Args:
            i: its first layer.
            j: one past its last layer.
            replicas: r_s.
            in_flight: n_s.
            policy: its recomputation policy.
            memory: bytes.
            gradients: gradients of outputs that wait.
            relaxed: whether a waiting input counts at most as many bytes as its residuals.
        """
        problem, inputs = self._problem, self._inputs[i]
        unchanged = self._residuals_of(i, j, "none")
        residuals = inputs if policy == "full" else self._residuals_of(i, j, policy)
        last = np.maximum(j - 1, i)
        temporary = self._temporary(i, j) + (self._more[last] - self._more[i])
        everything = None if self._remaking is None else self._everything(i, last)
        is_fused = np.equal(j, self.count) & np.equal(in_flight, 1)  # forward and backward of the last stage are one program
        residuals = np.where(is_fused, 0, residuals)
        if policy != "none" or np.any(is_fused):
            temporary = temporary_bytes(temporary, everything, unchanged, residuals, inputs)
        stage_size = stage_bytes(
            self._weights[j] - self._weights[i],
            self._optimizer[j] - self._optimizer[i],
            self._state[j] - self._state[i],
            residuals,
            inputs,
            self.outputs[j],
            temporary,
            np.where(np.equal(j, self.count), problem.labels, 0),
            versions=problem.versions(in_flight, replicas),
            in_flight=in_flight,
            waiting=0,
            accumulators=self._summed[j] - self._summed[i],
            replicas=replicas,
            gradients=gradients,
            ahead=self._ahead[j] - self._ahead[i],
        )
        free = np.floor(np.minimum(memory - stage_size, _ENOUGH)).astype(np.int64)
        each = np.minimum(inputs, residuals) if relaxed else inputs
        return np.where(free < 0, -1, np.where(each > 0, free // np.maximum(each, 1), _ENOUGH))

    def _everything(self, i: Number, last: Number) -> Number:
        """Return the scratch memory of a backward that makes all residuals of the layers i to `last` itself."""
        assert self._remaking is not None
        before = np.maximum(last - 1, i)
        more = self._remaking_next[before] + self._remaking_more[before] - self._remaking_more[i]
        return self._remaking[last] + np.where(last > i, more, 0)

    def _residuals_of(self, i: Number, j: Number, policy: str) -> Number:
        residuals, shared = self._residuals[policy]
        return residuals[j] - residuals[i] - (shared[np.maximum(j, 1) - 1] - shared[i])


class _Most:
    """The maximum of values[i:j], for arrays of i < j, from two overlapping windows whose lengths are powers of two."""

    def __init__(self, values: list[int]) -> None:
        rows = [np.array(values)]
        while 2 ** len(rows) <= len(values):
            half = 2 ** (len(rows) - 1)
            rows.append(np.append(np.maximum(rows[-1][:-half], rows[-1][half:]), np.zeros(half, int)))
        self._rows = np.stack(rows)
        self._power = np.array([0, *(length.bit_length() - 1 for length in range(1, len(values) + 1))])

    def __call__(self, i: Number, j: Number) -> Any:
        k = self._power[j - i]
        return np.maximum(self._rows[k, i], self._rows[k, j - 2**k])


def _sums(values: list[Any]) -> Any:
    return np.concatenate([[0], np.cumsum(np.array(values))])
