"""The seconds of a batch in closed form. The search uses them only to choose which plans to simulate."""

from typing import Any, NamedTuple

import numpy as np

import jpipe
from jpipe.schedules import PlainShape

__all__ = ["all_reduce_seconds"]

Number = Any  # float or array

_COMPUTES = 0.9  # above this share of a batch, the slowest stage is named as its limit


def all_reduce_seconds(size: Number, replicas: Number, link: jpipe.Link) -> Number:
    """Return the seconds of a ring of r workers that sums `size` bytes: in 2 (r - 1) steps they send shares, and then sums of shares."""
    steps = 2 * (replicas - 1)
    return steps / replicas * size / link.bandwidth + steps * link.latency


class Times(NamedTuple):
    """Seconds of the stages of a plan with one stage on each rank, and of the cuts between them.

    Attributes:
        forward, backward, update: for each stage, of one microbatch with recomputation, and of one update.
        all_reduce: for each stage the sum of the gradients of an update over its replicas; 0 with one replica.
        messages: for each cut the time to send the outputs of a microbatch; their gradients take as long.
        latencies: for each cut the time from the end of sending to the arrival.
        sending: the time that the busiest port sends messages in a batch.
        port: the time that the busiest port sends messages and sums in a batch.
    """

    forward: Any
    backward: Any
    update: Any
    all_reduce: Any
    messages: Any
    latencies: Any
    sending: float
    port: float

    def overlapping(self, overlap: jpipe.programs.Overlap) -> "Times":
        """Return the times if only `overlap` overlaps with computations. The other transfers and sums are added to the computations."""
        times = self
        if overlap != "transfers and sums":
            times = times._replace(update=times.update + times.all_reduce, all_reduce=np.zeros_like(times.all_reduce))
        if overlap == "none":  # a message keeps both of its devices from computing
            around = np.append(times.messages, 0.0) + np.append(0.0, times.messages)
            latencies = times.latencies - times.messages
            times = times._replace(forward=times.forward + around, backward=times.backward + around, latencies=latencies)
        return times


def batch_seconds(shape: PlainShape, times: Times, in_flight: Any, hidden: Any) -> tuple[float, str]:
    """Return the seconds of a batch, and what limits them: a stage that computes, a cut, a sum, or the bubble.

    Without a flush, the longest of three times decides: the computations of a device, the messages of the busiest port, and the round trip
    of the microbatches in flight from a stage to the last stage. A sum adds only the part that computations with older weights do not hide:
    `hidden` microbatches of a replica. With a flush, one microbatch goes through all stages and back, each further microbatch adds the time
    of the slowest stage or cut, and the sums end the batch.
    """
    rules = jpipe.schedules.SCHEDULES[shape.schedule]
    each: Any = np.array([shape.microbatches / count for count in shape.replicas])
    compute, cuts = times.forward + times.backward, times.messages + times.latencies
    before: Any = np.append(0.0, np.cumsum(compute[:-1] + 2 * cuts))
    trip = before[-1] + compute[-1]
    slowest, cut = f"stage {int((each * compute).argmax())} computes", f"cut {int(cuts.argmax()) if len(cuts) else 0}"
    # the round trip of a microbatch from each stage to the last, divided by the microbatches in flight
    returns: Any = np.where(in_flight < each, (trip - before) / in_flight, 0.0)
    if rules.flushes:
        m, summed = float(each.max()), times.all_reduce + times.update - before
        if rules.closed_form == "serial":
            passed = m * trip
        elif rules.closed_form == "fill and drain":
            passed = trip + (m - 1) * (times.forward.max() + times.backward.max())
        else:
            # how long each stage waits for the first gradient and for the last one while it has nothing to compute
            after, others = trip - before - compute, in_flight - 1
            first, last = (np.maximum(after - others * part, 0.0) for part in (times.forward, times.backward))
            idle = np.where(each > in_flight, first + last, np.maximum(first, last))
            passed = (before + each * compute + idle).max()
            passed = max(passed, trip + (m - 1) * returns.max() if returns.max() > compute.max() else trip)
        passed = max(passed, times.sending)
        unlinked = m * compute.sum() if rules.closed_form == "serial" else compute.sum() + (m - 1) * compute.max()
        seconds, computes = max(passed + summed.max(), times.port), m * compute.max()
        parts = {cut: passed - unlinked, f"sum of stage {int(summed.argmax())}": summed.max(), "bubble": unlinked - computes}
    else:
        updates = np.array([shape.microbatches / shape.microbatches_per_update(s) for s in range(shape.depth)])
        loads = each * compute + updates * times.update
        computes = loads.max()
        linked = max((each * returns).max(), times.sending)
        seconds = max(computes, linked)
        waits: Any = updates * (times.all_reduce + times.update) + (each - updates * hidden) * seconds / each
        waits = np.where(times.all_reduce > 0, waits, 0.0)
        seconds, linked = max(seconds, times.port, waits.max()), max(linked, times.port)
        parts = {cut: linked, f"sum of stage {int(waits.argmax())}": waits.max()}
    return float(seconds), slowest if computes >= _COMPUTES * seconds else max(parts, key=parts.__getitem__)
