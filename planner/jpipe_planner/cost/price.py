"""Closed forms for the seconds of a plan: small functions that all searches share. They take numbers and NumPy arrays.

All take numbers and NumPy arrays.
"""

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import jpipe

Number = Any  # float or array


def all_reduce_seconds(size: Number, replicas: Number, link: jpipe.Link) -> Number:
    """Return the seconds of a ring over `replicas` workers that sums `size` bytes.

    2 (r - 1) / r of them leave and reach each worker, in 2 (r - 1) steps.
    """
    steps = 2 * (replicas - 1)
    return steps / replicas * size / link.bandwidth + steps * link.latency


def cut_seconds(size: Number, link: jpipe.Link) -> Number:
    """Return the seconds in which the outputs of a microbatch cross a cut, or their gradients return: links are full duplex.

    The latency is not included: it does not slow the pipeline down as long as enough microbatches are in flight.
    """
    return size / link.bandwidth


def stage_seconds(compute: Number, update: Number, all_reduce: Number, replicas: Number, microbatches: Number) -> Number:
    """Return the seconds per microbatch that a stage of a pipeline in steady state needs, divided among its replicas.

    Per update each replica computes M_s / r_s microbatches and updates once. The sum of the gradients overlaps with the forward and
    backward after it, and the stage waits for what remains of it. With M_s = r_s that is the larger of compute and all-reduce, as in
    PipeDream (SOSP 2019), section 3.1.

    Args:
        compute: seconds of the forward and backward of one microbatch.
        update: seconds of an update.
        all_reduce: seconds to sum the gradients over the replicas.
        replicas: r_s.
        microbatches: M_s, microbatches per update over all replicas.
    """
    microbatches_per_replica = microbatches / replicas
    return (microbatches_per_replica * compute + update + np.maximum(all_reduce - compute, 0.0)) / microbatches


class Times(NamedTuple):
    """Seconds of w parallel equal pipelines; the last axis is that of the stages, or of the cuts between them.

    Attributes:
        forward: seconds of the forward of one microbatch.
        backward: seconds of its backward, including recomputation.
        update: seconds of one update.
        all_reduce: seconds of the sum of the gradients over the w replicas.
        sharing: groups of stages whose sums go through the same ports.
        messages: seconds to send the outputs of a microbatch over the slowest of the w links; gradients take the same time.
        latencies: seconds from the end of sending to the arrival.
        one_way: seconds of the busiest port of a cut in one direction, for one microbatch of each pipeline.
        both_ways: the same, including the gradients that go through this port.
    """

    forward: Any
    backward: Any
    update: Any
    all_reduce: Any
    sharing: tuple[tuple[int, ...], ...]
    messages: Any
    latencies: Any
    one_way: Any
    both_ways: Any

    @property
    def compute(self) -> Any:
        """Seconds of the forward and backward of each stage."""
        return self.forward + self.backward

    @property
    def cuts(self) -> Any:
        """Seconds from one side of each cut to the other."""
        return self.messages + self.latencies

    @property
    def round_trip(self) -> Any:
        """Seconds of a microbatch through all stages and back."""
        return self.compute.sum(-1) + 2 * self.cuts.sum(-1)

    @property
    def unlinked(self) -> "Times":
        """The same stages with messages that take no time."""
        nothing = np.zeros_like(self.messages)
        return self._replace(messages=nothing, latencies=nothing, one_way=nothing, both_ways=nothing)


class Price(NamedTuple):
    """The seconds of a batch in steady state, and what limits them: an index into `BOUNDS`, and the stage or cut."""

    seconds: Any
    bound: Any
    where: Any


BOUNDS = ("stage {} computes", "cut {}", "sum of stage {}", "bubble")


def steady_price(times: Times, microbatches: Number, hidden: Number, extra: int) -> Price:
    """Price 1F1B without a flush, where the slowest cycle determines the speed.

    In a cycle from stage s to stage s' and back there are n_s - n_s' + 1 microbatches at a time, and the next one enters when one
    returns to s. So a slow stage counts in full, and so does a slow link unless more microbatches are in flight. In addition a stage
    waits for the part of the sum of its gradients that does not overlap.

    Args:
        times: the times of the stages and cuts.
        microbatches: m of each pipeline per update; its last axis has length 1.
        hidden: the number of pairs of forward and backward that a sum overlaps with, by stage.
        extra: extra_in_flight.
    """
    m = microbatches[..., 0]
    slots = times.compute + times.update / microbatches
    round_trips, under_way = _cycles(slots, times.cuts, extra)
    period = (round_trips / under_way).max(-1)
    summed = times.all_reduce + times.update + (microbatches - hidden) * period[..., None]
    summed = np.where(times.all_reduce > 0, summed, 0.0)
    ports = [times.all_reduce[list(stages)].sum() for stages in times.sharing]  # of all sums of a batch
    terms = (m * slots.max(-1), m * np.maximum(period, _most(times.both_ways)), np.maximum(summed.max(-1), max(ports, default=0.0)))
    return _price(np.maximum(np.maximum(terms[0], terms[1]), terms[2]), terms, slots, _slowest_cut(times), summed)


def flush_price(times: Times, microbatches: Number, extra: int = 0) -> Price:
    """Price 1F1B with a flush, then the sums. See `steady_price`.

    A stage computes m microbatches between the arrival of the first one and the return of the last one. In between it waits for later
    stages twice: for the first gradient, if its forwards until then take less time, and for the last gradient, if its remaining
    backwards take less time. With slow links it waits in a repeating cycle.

    Args:
        times: the times of the stages and cuts.
        microbatches: m of each pipeline; its last axis has length 1.
        extra: extra_in_flight.
    """
    return _flushed(times, microbatches[..., 0], lambda times: _flush_repeated(times, microbatches, extra))


def _flush_repeated(times: Times, microbatches: Number, extra: int) -> Number:
    """Return the seconds of 1F1B with a flush, without one microbatch through all stages and back."""
    m, compute = microbatches[..., 0], times.compute
    depth = compute.shape[-1]
    before = np.concatenate([np.zeros_like(compute[..., :1]), np.cumsum(compute[..., :-1] + 2 * times.cuts, -1)], -1)
    after = times.round_trip[..., None] - before - compute
    others = (1 + extra) * np.arange(depth)[::-1]
    in_flight = np.minimum(others, microbatches - 1)  # the other microbatches in flight
    first = np.maximum(after - in_flight * times.forward, 0.0)
    last = np.maximum(after - in_flight * times.backward, 0.0)
    waits = np.where(microbatches > others + 1, first + last, np.maximum(first, last))
    seconds = (before + microbatches * compute + waits).max(-1)
    round_trips, under_way = _cycles(compute, times.cuts, extra)
    slowest = compute.max(-1, keepdims=True)
    rounds = (microbatches - 1) // under_way
    remaining = microbatches - 1 - rounds * under_way
    repeats = (rounds > 0) & (round_trips > under_way * slowest)
    repeated = np.where(repeats, rounds * round_trips + remaining * slowest, 0.0).max(-1)
    repeated = np.maximum(repeated, (m - 1) * _most(times.both_ways))
    return np.maximum(repeated, seconds - times.round_trip)


def gpipe_price(times: Times, microbatches: Number) -> Price:
    """Price all forwards at the speed of the slowest stage or port, then all backwards, then the sums. See `steady_price`."""
    m = microbatches[..., 0]

    def repeated(times: Times) -> Number:
        port = _most(times.one_way)
        return (m - 1) * (np.maximum(times.forward.max(-1), port) + np.maximum(times.backward.max(-1), port))

    return _flushed(times, m, repeated)


def naive_price(times: Times, microbatches: Number) -> Price:
    """Price one microbatch after the other through all stages and back, then the sums. See `steady_price`."""
    m = microbatches[..., 0]
    return _flushed(times, m, lambda times: (m - 1) * times.round_trip)


CLOSED_FORMS = {"serial": naive_price, "fill and drain": gpipe_price, "1F1B": flush_price}
"""The price of a batch with a flush, by `jpipe.schedules.Schedule.closed_form`; `walked_price` is for all other schedules."""

Orders = tuple[tuple[tuple[str, int], ...], ...]
"""The computations of each stage for a batch: (F, B or FB, microbatch)."""

_FEWEST_WALKED = 16  # microbatches, whatever the depth


def walked_price(times: Times, microbatches: Number, orders: Callable[[int], Orders]) -> Price:
    """Price a batch in any order, computation by computation, then the sums. See `steady_price`.

    Of many microbatches it walks through only as many as show how much longer each further one takes.

    Args:
        times: the times of the stages and cuts.
        microbatches: m of each pipeline; its last axis has length 1.
        orders: returns the orders of all stages for a number of microbatches.
    """
    m = microbatches[..., 0]

    def repeated(times: Times) -> Number:
        backward = np.broadcast_to(times.backward, (len(m), times.forward.shape[-1]))
        walked = [
            _walked_seconds(times._replace(backward=seconds), count, orders) for seconds, count in zip(backward, m.tolist(), strict=True)
        ]
        return np.maximum(np.array(walked) - times.round_trip, (m - 1) * _most(times.both_ways))

    return _flushed(times, m, repeated)


def _walked_seconds(times: Times, microbatches: int, orders: Callable[[int], Orders]) -> float:
    sample = len(times.forward) * -(-_FEWEST_WALKED // len(times.forward))
    if microbatches <= 4 * sample:
        return _walk(times, orders(microbatches))
    short, long = (_walk(times, orders(count)) for count in (2 * sample, 4 * sample))
    return long + (microbatches - 4 * sample) * (long - short) / (2 * sample)


def _walk(times: Times, orders: Orders) -> float:
    """Return the seconds from the first start of a batch to its last end; each direction of a cut carries one message at a time."""
    forward, backward, messages, latencies = (part.tolist() for part in (times.forward, times.backward, times.messages, times.latencies))
    last, clocks, positions = len(orders) - 1, [0.0] * len(orders), [0] * len(orders)
    arrived: dict[tuple[int, bool, int], float] = {}  # by stage, whether it is an output gradient, and microbatch
    free: dict[tuple[int, int], float] = {}  # when each link between two stages is free
    ready = deque(range(len(orders)))
    while ready:
        s = ready.popleft()
        while positions[s] < len(orders[s]):
            op, k = orders[s][positions[s]]
            back = op == "B"
            needed = 0.0 if s == (last if back else 0) else arrived.get((s, back, k))
            if needed is None:
                break
            clocks[s] = max(clocks[s], needed) + (0.0 if back else forward[s]) + (0.0 if op == "F" else backward[s])
            positions[s] += 1
            to = s + 1 if op == "F" else s - 1
            if 0 <= to <= last:
                cut = min(s, to)
                free[s, to] = max(clocks[s], free.get((s, to), 0.0)) + messages[cut]
                arrived[to, to < s, k] = free[s, to] + latencies[cut]
                ready.append(to)
    assert all(position == len(computations) for position, computations in zip(positions, orders, strict=True)), (
        "the orders of the schedule deadlock"
    )
    return max(clocks)


def paper_price(times: Times, microbatches: Number, rounds: Number) -> Price:
    """Price a batch as in the appendix of PipeDream-2BW (ICML 2021): by the larger of compute with transfers, and the all-reduce.

    Updates cost nothing.

    Args:
        times: the times of the stages and cuts.
        microbatches: m of each pipeline per update; its last axis has length 1.
        rounds: time of a batch in microbatches of the slowest stage: m without a flush, m + d - 1 with one, m d one after the other.
    """
    moved = np.zeros(times.compute.shape[-1])
    moved[1:] += times.cuts
    moved[:-1] += times.cuts
    slots = times.compute + moved
    terms = (rounds * slots.max(-1), (rounds / microbatches[..., 0]) * times.all_reduce.max(-1))
    return _price(np.maximum(*terms), (terms[0], np.zeros_like(terms[0]), terms[1]), slots, 0, times.all_reduce)


def _flushed(times: Times, m: Number, repeated: Callable[[Times], Number]) -> Price:
    """Price a batch with a flush, whose sums overlap with draining the earlier stages, and with the next filling.

    Pipelines that start together and share ports finish one message apart. Sums that share ports are done one after the other, that of
    the last stage first.

    Args:
        times: the times of the stages and cuts.
        m: microbatches of each pipeline.
        repeated: additional seconds of all microbatches compared with one, for any times.
    """
    drained, filled = np.zeros_like(times.compute), np.zeros_like(times.compute)
    drained[..., 1:] = np.cumsum(times.backward[..., :-1] + times.cuts, -1)
    filled[..., 1:] = np.cumsum(times.forward[..., :-1] + times.cuts, -1)
    ends = times.all_reduce - drained
    for stages in times.sharing:
        for after, s in zip(stages[:0:-1], stages[-2::-1], strict=True):
            ends[..., s] = np.maximum(-drained[..., s], ends[..., after]) + times.all_reduce[s]
    summed = ends + times.update - filled
    passed = times.round_trip + _most(times.one_way - times.messages) + repeated(times)
    unlinked = times.unlinked.round_trip + repeated(times.unlinked)
    computes, seconds = m * times.compute.max(-1), passed + summed.max(-1)
    terms = (computes, passed - unlinked, summed.max(-1), unlinked - computes)
    return _price(seconds, terms, times.compute, _slowest_cut(times), summed)


def _price(seconds: Number, terms: tuple[Number, ...], slots: Number, cut: int, summed: Number) -> Price:
    """Return the price, limited by the slowest stage if its work takes nine tenths of the time, otherwise by the largest other term."""
    computes = np.where(terms[0] >= 0.9 * seconds, np.inf, 0.0)
    bound = np.argmax(np.stack(np.broadcast_arrays(computes, *terms[1:])), 0)
    where = np.choose(bound, (slots.argmax(-1), cut, summed.argmax(-1), 0))
    return Price(seconds, bound, where)


def _cycles(slots: Number, cuts: Number, extra: int) -> tuple[Number, Number]:
    """Return the cycles from stage s to s' and back to the next forward at s, for all s <= s'.

    Returns:
        The seconds of each cycle; the number of microbatches in it.
    """
    first, last = _pairs(slots.shape[-1])
    ends = np.cumsum(slots, -1)
    links = np.concatenate([[0.0], np.cumsum(cuts)])
    return ends[..., last] - (ends - slots)[..., first] + 2 * (links[last] - links[first]), 1 + (last - first) * (1 + extra)


@cache
def _pairs(depth: int) -> Any:
    return np.triu_indices(depth)


def _most(values: Number) -> Number:
    return values.max(initial=0.0)


def _slowest_cut(times: Times) -> int:
    return int(np.argmax(np.maximum(times.cuts, times.both_ways))) if times.cuts.size else 0
