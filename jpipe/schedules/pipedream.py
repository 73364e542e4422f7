"""PipeDream: 1F1B without a flush. Each stage stashes the weight versions that its microbatches in flight have read.

3 stages, 1 microbatch per batch, 5 batches (`F3.1`: forward of microbatch 3 at weight version 1; `*`: an update follows):

    tick   |    0    1      2 3 4      5 6     7      8    9    10     11   12    13     14 15    16    17 18    19 20
    rank 0 | F0.0 F1.0   F2.0 . .      . . B0.0*      - F3.1 B1.0*      - F4.2 B2.0*      -  . B3.1*     -  . B4.2*  -
    rank 1 |    . F0.0   F1.0 . .  B0.0* -  F2.1  B1.0*    -  F3.2  B2.1*    -  F4.3  B3.2*  -     . B4.3*  -     .  .
    rank 2 |    .    . FB0.0* - - FB1.1* -     - FB2.2*    -     - FB3.3*    -     - FB4.4*  -     -     .  .     .  .

Version read at stage s: floor(max(k - (n_s - 1), 0) / m) with n_s = d - s: W_s(t - d + s + 1), staleness d - 1 - s updates for m = 1.
Versions alive: ceil((n_s - 1) / m) + 1.

With `vertical_sync` every stage reads the version that the first stage reads, floor(max(k - (n_0 - 1), 0) / m). For m = 1 this is W(t - d +
1), so the staleness is d - 1 at every stage. Every stage holds ceil((n_0 - 1) / m) + 1 versions. The mean staleness is (d - 1 - s) / m, or
(d - 1) / m with vertical sync. For m >= d at most two versions are alive, as under 2BW, but the staleness is less.

Replicated stages (1F1B round-robin): microbatch k runs on replica k mod r_s, and the replicas sum their gradients before an update. Version
read: floor(max(floor(k / r_s) - (n_s - 1) - l, 0) / (M_s / r_s)). For r_s > 1, l = 1: the sum overlaps with one forward and backward. For
r_s = 1, l = 0. M_s, the number of microbatches per update, is m, or r_s with update_every "replicas".

With several stages on a rank the order is like `interleaved_1f1b`, but without a flush. Version read: floor(max(D(s, k) - l, 0) / (m / r)),
where D(s, k) is the number of backwards that the rank has done for stage s before the forward of k (`_interleaved.endless_done`), r is the
number of replicas, and l is as above. A replica's groups of p microbatches, where p is the number of ranks, continue across batches and
drains. The versions alive are counted in the order. Needs m / r >= p.

With `stash: false` the backward of k reads the newest version, floor(k / m), and no older version is kept for it (PACI, arXiv 2606.07881).
For m >= d a microbatch crosses at most one update. A stage holds one version while the run trains; a drain keeps the versions that the next
forwards read.

While microbatches are in flight, `evaluate` reads the newest version that all replicas of all stages hold; if there is none, it drains a
copy of the state. Replicas keep their own layer state until a drain, even in the batches of `flush_first`.

Reference: PipeDream (SOSP 2019), sections 3.2 and 3.3, figures 4, 8 and 9.
"""

from typing import Any

from jpipe.schedules._interleaved import (
    endless_done,
    endless_in_flight,
    endless_order,
    endless_period,
    unequal_replicas,
)
from jpipe.schedules._schedule import Schedule, Shape, pipeline_in_flight


def _leader(plan: Shape, s: int) -> int:
    """Return the stage that determines the version that stage s reads: stage 0 under vertical sync, otherwise s."""
    return 0 if plan.options.vertical_sync else s


def _sync_delay(plan: Shape, s: int) -> int:
    """Return by how many forwards stage s delays a new version: 1 if an all-reduce overlaps with one forward and backward, else 0."""
    return int(plan.replicas[s] > 1)


def _version(plan: Shape, s: int, k: int) -> int:
    """Return the newest version that exists when a replica of stage s, with n_s in flight, computes the forward of k.

    It is floor(max(D(s, k) - l, 0) / (M_s / r_s)) with D(s, k) = `endless_done`, l = `_sync_delay` and M_s =
    `plan.microbatches_per_update(s)`. Without replicas and chunks it is floor(max(k - (n_s - 1), 0) / m). Under vertical sync every stage
    reads the version of stage 0. All slices of the same rows read the version of the first one.
    """
    leader = _leader(plan, s)
    done = endless_done(plan, leader, k - k % plan.row_slices) - _sync_delay(plan, leader)
    return max(done, 0) * plan.replicas[leader] // plan.microbatches_per_update(leader)


def _versions_alive(plan: Shape, s: int) -> int:
    leader, every = _leader(plan, s), plan.microbatches_per_update(s)
    if plan.depth == len(plan.pipeline_ranks):
        return pipedream_versions(pipeline_in_flight(plan, leader), plan.replicas[leader], _sync_delay(plan, leader), every)
    replicas, each, first = plan.replicas[s], plan.row_slices, 100 * plan.depth * plan.row_slices
    late = range(first, first + endless_period(plan) * plan.microbatches)  # how many backwards a replica has done
    return max(done * replicas // every - _version(plan, s, (done - done % each) * replicas) + 1 for done in late)


def pipedream_versions(in_flight: Any, replicas: Any, delay: Any, microbatches: Any) -> Any:
    """Return the number of versions from the one that the next microbatch reads to the newest, ceil((n - 1 + l) / (M / r)) + 1.

    A stage with l = 1 reaches this number only in a drain. All arguments may be numbers or NumPy arrays.

    Args:
        in_flight: n, the number of microbatches in flight at the leader: the stage that determines which versions are read.
        replicas: r, the number of replicas of the leader.
        delay: l, which is 1 if the leader's sum over replicas overlaps with computations, otherwise 0.
        microbatches: M, the number of microbatches per update of the stage that holds the versions.
    """
    return -(-(in_flight - 1 + delay) * replicas // microbatches) + 1


def _refusal(plan: Shape) -> str:
    if plan.depth > len(plan.pipeline_ranks) and (reason := _chunk_refusal(plan)):
        return reason
    if not plan.options.stash and (problem := _without_stash(plan)):
        return f"stash: false needs {problem}"
    rates = {plan.microbatches_per_update(s) for s in range(plan.depth)}
    if plan.options.vertical_sync and len(rates) > 1:
        return (
            f"vertical_sync needs stages that update together, found replicas {list(plan.replicas)} with update_every 'replicas'; "
            "use update_every 'batch'"
        )
    return ""


def _without_stash(plan: Shape) -> str:
    """Return what a plan without a stash needs, or ""."""
    if plan.depth > len(plan.pipeline_ranks):
        return "one stage on each rank; leave out chunks_per_rank"
    if max(plan.replicas) > 1:
        return f"one replica of each stage, found replicas {list(plan.replicas)}"
    if plan.options.vertical_sync:
        return "stages that read their newest weights; leave out vertical_sync"
    if plan.options.split_backward != "joint":
        return "backwards that are one computation; leave out split_backward"
    return ""


def _chunk_refusal(plan: Shape) -> str:
    """Return why ranks cannot run several chunks of this plan, or ""."""
    microbatches, ranks = plan.microbatches_per_update(0) // plan.row_slices, len(plan.pipeline_ranks)
    if microbatches // plan.replicas[0] < ranks:  # with fewer, versions would not advance one by one
        least, replicas = ranks * plan.replicas[0], f" with {plan.replicas[0]} replicas" if plan.replicas[0] > 1 else ""
        return (
            f"the schedule 'pipedream' with several stages on each of {ranks} ranks{replicas} needs at least {least} microbatches "
            f"per update, found {microbatches}; raise microbatches or use one stage for each rank"
        )
    return unequal_replicas(plan)


def _updates_early(plan: Shape) -> bool:
    """Return whether updates cannot use the gradients of all stages, or their norm: so it is without vertical sync.

    Let L be the last microbatch of a batch. Stage s updates before its forward of microbatch L + n_s, and the norm is known after the
    backward of L at stage 0. This backward comes after L's backwards at the stages before s, but the forward does not: stage s - 1 with
    n_{s-1} > n_s does its forward of L + n_s before its backward of L. So stage s > 0 would wait for s backwards, for any m. Under vertical
    sync stages update before their forward of L + n_0, which stage 0 begins after its backward of L.
    """
    return plan.depth > 1 and not plan.options.vertical_sync


PIPEDREAM = Schedule(
    name="pipedream",
    flushes=False,
    order=endless_order,
    in_flight=endless_in_flight,
    done=endless_done,
    period=endless_period,
    layout="looped",
    formula=_version,
    versions_alive=_versions_alive,
    refusal=_refusal,
    updates_early=_updates_early,
    options=("extra_in_flight", "max_in_flight", "vertical_sync", "stash", "update_every", "flush_first", "split_backward"),
    closed_form="1F1B",
    takes_slices=True,
)
