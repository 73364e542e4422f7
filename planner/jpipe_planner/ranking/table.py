"""Write the ranking as text: a row for each candidate, and the reasons why other candidates were rejected."""

import math
from collections import Counter
from collections.abc import Sequence

import jpipe
from jpipe_planner.cost.devices import order_of
from jpipe_planner.machine.topology import Topology
from jpipe_planner.ranking.choose import EQUAL, Choice, Ranked
from jpipe_planner.ranking.find import Attempt
from jpipe_planner.search.candidate import Candidate

__all__ = [
    "WHY_HEAD",
    "WORDS",
    "attempt",
    "delay",
    "devices",
    "head",
    "legend",
    "links",
    "name",
    "no_pipeline",
    "price_of_flush",
    "rate",
    "rows",
    "rows_of",
    "schedule",
    "shape",
    "size",
    "what_would_fit",
    "why_chosen",
    "why_rejected",
]

WORDS = ("schedule", "devices", "recompute", "bound by", "why not", "peak memory of each rank")  # columns of words, which are aligned left
HEAD = (
    "rank",
    "schedule",
    "stages",
    "rows",
    "m",
    "recompute",
    "samples/s",
    "bubble",
    "delay",
    "peak memory",
    "sent/sample",
    "bound by",
)
"""The columns. If plans have meshes, `mesh` follows `stages`. If devices differ, so does `devices`, in the order of the stages."""


def rows(choice: Choice, most: int) -> list[tuple[str, ...]]:
    """Return rows for the first `most` plans that fit, and for the best plan for one device. `head` returns the columns."""
    alone = [n for n, ranked in enumerate(choice.ranked) if ranked.candidate.devices == 1]
    shown = {*range(min(most, len(choice.ranked))), *alone[:1]}
    return [_row(choice, n + 1, choice.ranked[n]) for n in sorted(shown)]


def head(choice: Choice) -> tuple[str, ...]:
    """Return the columns of `rows`."""
    meshes, devices = ("mesh",) * has_meshes(choice), ("devices",) * bool(choice.topology.differing)
    return (*HEAD[:3], *meshes, *devices, *HEAD[3:])


def has_meshes(choice: Choice) -> bool:
    """Return whether a plan is on meshes."""
    return any(candidate.degrees.size > 1 for candidate in (*choice.rejected, *(ranked.candidate for ranked in choice.ranked)))


def legend(choice: Choice, most: int, known_by: str) -> str:
    """Return the meaning of the columns. `known_by` says how the peak memory was found."""
    unsimulated = any(ranked.simulated is None for ranked in choice.ranked[:most])
    return (
        "stages: 4 × 2 is 4 stages of 2 replicas each; delay: the mean age of the weights in updates; peak memory: of the fullest device, "
        f"{known_by}" + ("; ≈: a closed form, because a simulation would take too long" if unsimulated else "")
    )


def no_pipeline(choice: Choice) -> str:
    """If the best plan has one stage, return a line that pipelines do not pay off here; otherwise ""."""
    best = choice.ranked[0]
    if best.candidate.depth > 1:
        return ""
    other = next((one for one in choice.ranked if one.candidate.depth > 1), None)
    how = schedule(best.candidate) if best.candidate.num_ranks == 1 else "data parallelism"
    if other is None:
        return f"no pipeline pays here: {how} is as fast or faster"
    slower = best.samples_per_second / other.samples_per_second - 1
    if slower < -EQUAL:
        faster = other.samples_per_second / best.samples_per_second - 1
        return f"no pipeline pays here: the best one, {name(other.candidate)}, is only {faster:.1%} faster than {how}"
    than_it = f"{slower:.1%} slower" if slower > EQUAL else "no faster"
    return f"no pipeline pays here: {how} is as fast or faster; the best one, {name(other.candidate)}, is {than_it}"


def shape(candidate: Candidate) -> str:
    """Return the stages: `4 × 2` for two pipelines of four stages, `2·1·1` for unequal replicas, `4 ranks of 2` for two stages a rank."""
    if candidate.chunks > 1:
        replicas = f" × {candidate.replicas[0]}" if candidate.replicas[0] > 1 else ""
        return f"{candidate.num_pipeline_ranks} ranks of {candidate.chunks}{replicas}"
    if len(set(candidate.replicas)) > 1:
        return "·".join(map(str, candidate.replicas))
    return f"{candidate.depth} × {candidate.replicas[0]}" if candidate.replicas[0] > 1 else str(candidate.depth)


def recomputation(policies: Sequence[str]) -> str:
    """Return the recomputation: `none`, or `none, full` if the stages differ."""
    return ", ".join(dict.fromkeys(policies))


def schedule(candidate: Candidate) -> str:
    """Return the name of the schedule with its options."""
    parts = max((len(parts) for parts in candidate.sum_parts), default=1)
    in_parts = [f"sum in {parts} parts"] if parts > 1 else []
    waiting = [f"offload {offloaded(candidate)}"] if candidate.offload is not None else []
    cut = [] if candidate.slices is None else [f"{candidate.num_slices} slices"]
    agree, links, agreeing = candidate.agree, candidate.links, list[str]()
    if agree is not None:  # `agree every 50`, or `agree every 50, 5 late, in 4 bits`
        agreeing = [f"agree every {agree.every}", *([f"{agree.delay} late"] if agree.delay else [])]
        agreeing += [f"in {agree.bits} bits"] if agree.bits else []
    if candidate.num_ranks == 1 and candidate.depth == 1:
        return ", ".join(["one device" if candidate.devices == 1 else "one mesh", *cut, *waiting])
    if candidate.depth == 1 and candidate.num_ranks > 1 and jpipe.schedules.SCHEDULES[candidate.schedule].data_parallel:
        return ", ".join(["data parallel", *cut, *agreeing, *in_parts, *waiting])
    if candidate.is_late_data_parallel:
        late = "one update" if candidate.delay == 1 else f"{delay(candidate)} updates"
        return f"data parallel, {late} late ({', '.join([candidate.schedule, *cut, *in_parts, *waiting])})"
    options = ["vertical sync"] if candidate.options.vertical_sync else []
    options += ["early"] if candidate.options.split_backward == "early" else []
    options += [f"+{candidate.options.extra_in_flight}"] if candidate.options.extra_in_flight else []
    options += [f"≤{candidate.options.max_in_flight}"] if candidate.options.max_in_flight else []
    options += ["shard_optimizer"] if candidate.shard_optimizer else []
    options += ["M_s = r_s"] if candidate.options.update_every == "replicas" else []
    options += ["stages together"] if candidate.keep_together == "stages" else []
    options += cut + in_parts + agreeing
    if links is not None:  # such as int8/fp8
        options += [f"links {links.activations or '–'}/{links.gradients or '–'}"]
        options += [] if links.bottleneck is None else [f"width {links.bottleneck.width}"]
    return " ".join([candidate.schedule, *options, *waiting])


def offloaded(candidate: Candidate) -> str:
    """Return the parts in host memory, such as `optimizer, residuals 0 1`. The numbers are stages; without numbers all stages are meant."""
    parts = [(what, stages) for what, stages in candidate.offload or () if stages]
    return ", ".join(what if stages == "all" else " ".join([what, *map(str, stages)]) for what, stages in parts)


def name(candidate: Candidate) -> str:
    """Return schedule and stages as a part of a sentence."""
    if candidate.num_ranks == 1 and candidate.depth == 1:
        return f"one stage on {schedule(candidate)}" + (f" ({candidate.degrees})" if candidate.degrees.size > 1 else "")
    mesh = f" on meshes ({candidate.degrees})" if candidate.degrees.size > 1 else ""
    return f"{schedule(candidate)} with {shape(candidate)} stage{'' if candidate.num_ranks == 1 else 's'}{mesh}"


def devices(topology: Topology) -> str:
    """Return the devices with the memory that a plan may use, such as `8 × A100 with 37.9 GB, 4 × V100 with 31 GB`."""
    kinds = [(topology.device.name, topology.device.limit)] * topology.num_devices
    if topology.differing:
        kinds = [(device.name, device.limit) for device in topology.devices]
    counts = Counter(kinds)
    return ", ".join(f"{count} × {kind}" + (f" with {size(limit)}" if limit else "") for (kind, limit), count in counts.items())


def links(topology: Topology) -> str:
    """Return the links of equal devices, and how many devices can compute at the same time, as a part of a sentence."""
    level, host = topology.levels[0], topology.device.host
    moves = f"; {size(host.bandwidth)}/s to host memory" if host.limit else ""
    if topology.num_devices == 1:
        return f"one device, no links{moves}"
    cores = "" if topology.cores is None else f"; {topology.cores:.3g} of {topology.num_devices} devices compute at full speed at a time"
    return f"links of {size(level.bandwidth)}/s, {level.latency * 1e6:,.0f} us per message{cores}{moves}"


def size(count: int | float) -> str:
    """Return bytes as text such as `1.2 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            shown = count / factor
            return f"{shown:,.0f} {unit}" if shown >= 100 else f"{shown:.3g} {unit}"
    return f"{count:.0f} B"


def delay(candidate: Candidate) -> str:
    """Return the mean delay in updates as text such as `0` or `0.375`."""
    return f"{candidate.delay:.3g}"


def rate(per_second: float) -> str:
    """Return samples per second as text such as `62,020` or `3.152`."""
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"


def rows_of(count: int) -> str:
    """Return a number of rows as text such as `1 row` or `2 rows`."""
    return f"{count} row" if count == 1 else f"{count} rows"


def why_rejected(choice: Choice, most: int) -> list[str]:
    """Return a line for each kind of plan that does not fit by its estimate. The plan that lacks least memory comes first."""
    lines = []
    for candidate in choice.rejected[:most]:
        stage, lacking = candidate.over or (0, 0)
        limit = choice.limits(candidate)[stage]
        plan = f"{name(candidate)}, {rows_of(candidate.rows)}"
        what = "rank" if candidate.chunks > 1 else "stage"
        lines.append(f"{plan}: {what} {stage} needs an estimated {size(limit + lacking)}, {size(lacking)} too much")
    return lines


def attempt(one: Attempt) -> str:
    """Describe a plan that does not fit after its stages are compiled: how many bytes they lack, and which plan is tried instead."""
    candidate, memory = one.ranked.candidate, one.compiled.ranked.memory
    what = "rank" if candidate.chunks > 1 else "stage"
    lacks = f"{what} {memory.index(max(memory))} lacks {size(one.compiled.lacking or 0)} when compiled"
    plan = f"{name(candidate)}, {rows_of(candidate.rows)}, recompute {recomputation(candidate.policies)}"
    if one.raised is None:
        return f"{plan}: {lacks}"
    stages: dict[str, list[str]] = {}
    for s, (before, after) in enumerate(zip(candidate.policies, one.raised.policies, strict=True)):
        if after != before:
            stages.setdefault(after, []).append(str(s))
    changes = [f"{policy} at {'stage' if len(numbers) == 1 else 'stages'} {', '.join(numbers)}" for policy, numbers in stages.items()]
    return f"{plan}: {lacks}; next with recompute {' and '.join(changes)}"


def why_chosen(choice: Choice, most: int) -> list[tuple[str, ...]]:
    """Return rows that compare the first plan that fits with the best plans of other kinds. `WHY_HEAD` has the columns."""
    rows = list[tuple[str, ...]]()
    for other in choice.ranked[:most]:
        candidate, limits = other.candidate, choice.limits(other.candidate)
        of = limits[:1] if len(set(limits)) == 1 else limits
        memory = ", ".join(map(size, other.memory)) + (f" of {', '.join(map(size, of))}" if math.inf not in of else "")
        mesh = f" ({candidate.degrees})" if candidate.degrees.size > 1 else ""
        milliseconds = f"{1e3 / other.samples_per_second:.4g} ms"
        why = "chosen" if other is choice.ranked[0] else _what_is_worse(choice.ranked[0], other)
        rows.append((schedule(candidate), shape(candidate) + mesh, milliseconds, f"{other.bubble:.1%}", memory, why))
    return rows


WHY_HEAD = ("schedule", "stages", "time per sample", "bubble", "peak memory of each rank", "why not")


def _what_is_worse(best: Ranked, other: Ranked) -> str:
    """Return words about how a plan is worse than the chosen plan."""
    candidate, chosen = other.candidate, best.candidate
    slower = best.samples_per_second / other.samples_per_second - 1
    if slower > EQUAL:
        more = 100 * (other.bubble - best.bubble)
        points = f"{more:.0f} {'point' if round(more) == 1 else 'points'}"
        return f"{slower:.1%} slower" + (f", {points} more bubble" if more > 1 else "")
    reasons = (
        (round(candidate.delay, 9) > round(chosen.delay, 9), "older weights"),
        (candidate.degrees.size > chosen.degrees.size, "larger meshes"),
        (candidate.num_pipeline_ranks > chosen.num_pipeline_ranks, "more ranks"),
        (candidate.num_pipeline_ranks == chosen.num_pipeline_ranks and candidate.chunks > chosen.chunks, "more stages on a rank"),
        (candidate.num_slices > chosen.num_slices, "more slices"),
        (chosen.has_whole_backwards and not candidate.has_whole_backwards, "more programs"),
        (max(other.memory) > max(best.memory), "more memory"),
    )
    return "as fast, " + next((what for holds, what in reasons if holds), "no better")


def what_would_fit(choice: Choice) -> list[str]:
    """For a model that fits nowhere, explain which stage lacks how many bytes, and what to change: not recomputation, which was tried."""
    best = choice.rejected[0]
    limits, (stage, lacking) = choice.limits(best), best.over or (0, 0)
    limit = limits[stage]
    devices, untried = choice.topology.num_devices, list[str]()
    if len(choice.profile.layers) > devices:
        untried.append(f"more than {devices} devices, for more stages")
    held = sum(layer.weights + layer.accumulators + layer.optimizer for layer in choice.profile.layers)
    if min(choice.profile.sizes) > 1 and held <= choice.topology.limits.sum():
        untried.append(f"smaller microbatches than {rows_of(min(choice.profile.sizes))}")
    if not any(jpipe.schedules.SCHEDULES[candidate.schedule].flushes for candidate in choice.rejected):
        untried.append("a schedule with one weight version")
    change = ", or ".join(untried or ["smaller layers, or devices with more memory"])
    return [
        f"no plan fits: nearest is {name(best)} and {rows_of(best.rows)} per microbatch, where stage {stage} "
        f"needs {size(limit + lacking)} of {size(limit)}, {size(lacking)} too much",
        f"what would make it fit: {change}",
    ]


def _row(choice: Choice, rank: int, ranked: Ranked) -> tuple[str, ...]:
    candidate, more = ranked.candidate, list[str]()
    if has_meshes(choice):
        more.append(str(candidate.degrees))
    if choice.topology.differing:
        more.append(order_of(candidate.plan(choice.profile.ids), choice.meshes.of(candidate.degrees)[1]))
    limit, memory = max(zip(choice.limits(candidate), ranked.memory, strict=True), key=lambda both: (both[1] / both[0], both[1]))
    moves = candidate.offload is not None and candidate.on_device
    slower = f" (offload {max(ranked.seconds / candidate.on_device - 1, 0):.1%} slower)" if moves else ""
    return (
        str(rank),
        schedule(candidate),
        shape(candidate),
        *more,
        str(candidate.rows),
        str(candidate.microbatches),
        recomputation(candidate.policies),
        ("" if ranked.simulated else "≈ ") + rate(ranked.samples_per_second) + slower,
        f"{ranked.bubble:.0%}",
        delay(candidate),
        size(memory) + (f" ({memory / limit:.0%})" if limit < math.inf else ""),
        size(candidate.sent),
        candidate.bound,
    )


def price_of_flush(choice: Choice, delayed: Ranked | None = None) -> list[str]:
    """Compare the best plan that flushes with the best asynchronous plan, and say when the asynchronous one pays.

    The asynchronous plan reaches a loss sooner if it needs more samples by a factor below its speed-up. For equal stages and links that
    take no time, the speed-up is (m + d - 1)/m. `delayed` is an asynchronous plan from outside the ranking, if the ranking has none.
    """
    by_flush = {jpipe.schedules.SCHEDULES[one.candidate.schedule].flushes: one for one in reversed(choice.ranked)}
    flushing, other = by_flush.get(True), by_flush.get(False, delayed)
    if flushing is None or other is None:
        return []
    ratio = other.samples_per_second / flushing.samples_per_second
    names = name(flushing.candidate), f"{name(other.candidate)} (mean delay {delay(other.candidate)})"
    if ratio <= 1 + EQUAL:
        speed = "as fast as" if ratio >= 1 - EQUAL else "faster than"
        return [f"price of the flush: none; {names[0]} is {speed} {names[1]}, and its weights are newer"]
    hint = (
        f"only schedules that flush were considered; {name(other.candidate)}, with delayed weights, would be about {ratio - 1:.0%} faster: "
        "--schedules all compares these, too, and --max-delay bounds the delay"
    )
    return [
        *([hint] if other is delayed else []),
        f"price of the flush: per sample, {names[0]} takes {ratio:.2f} times as long as {names[1]}",
        f"the asynchronous plan pays if it reaches the same loss with fewer than {ratio:.2f} times the samples "
        "(docs/explanation/learning.md)",
    ]
