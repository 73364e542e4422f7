"""`jpipe target NAME --longest-rows CONFIG`: how many tokens a row may have, so that a plan's ranks fit into the memory of a target."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rich.console import Console
from rich.filesize import decimal

import jpipe
from jpipe import InputError
from jpipe.context import tracing_for
from jpipe_planner import Profile, analyze
from jpipe_planner.machine.compiling import Compiling, compiling_for
from jpipe_planner.profile.model import Model
from jpipe_planner.profile.scratch import KINDS, compile_program
from jpipe_train.assemble.build import make_plan
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import align
from jpipe_train.plan.compiling import compiler_errors, read_device
from jpipe_train.plan.profiling import Parts

LENGTHS = (8192, 32768)  # the memory of rows of other lengths is on the line through these
STEP = 1024  # rows have a multiple of this number of tokens
SLICES = (None, 2, 4, 8, 16)
POLICIES = ("elementwise", "full")
COMPILED = 3  # the most lengths for which stages are compiled
Name = Literal["forward", "backward", "forward_backward"]


class Cell(NamedTuple):
    """The longest rows with one number of slices and one recomputation policy."""

    plan: jpipe.Plan  # the plan of the config with both
    peaks: tuple[tuple[int, ...], ...]  # for each of `LENGTHS` the predicted peak memory of each rank, in bytes
    tokens: int  # the predicted number of tokens of the longest rows; 0 if it is below the first of `LENGTHS`


def main(target: str, source: str, overrides: Sequence[str] = (), *, allow_code: bool = False) -> list[str]:
    """Return a table of the longest rows by number of slices and recomputation, and the longest with its stages compiled.

    `target` is a name as in `read_device`. The plan of the config `source` has the schedule, stages and microbatches; `slices` and
    `recompute` are varied unless it sets them; where slices are impossible, there are only whole rows. Raise InputError if there is no such
    target, XLA cannot compile for it here, or the model has no `seq_len`.
    """
    device = read_device(target, "target")
    compiling = compiling_for(device, unlimited=True)
    if compiling.missing:
        raise InputError(f"target: {compiling.missing}")
    limit = device.limit
    if limit is None:
        raise InputError(where="target", expected="a device with limited memory", found=f"'{target}'", change="add its memory")
    silent = Reporter(1, 1, "samples", Console(quiet=True))

    def config_of(tokens: int) -> Config:
        return config_file.load(source, (*overrides, f"model.seq_len={tokens}"), allow_code=allow_code)

    with tracing_for(compiling.devices[0].platform), compiler_errors(compiling.kind):
        parts = [Parts.of(config_of(tokens), silent) for tokens in LENGTHS]
        plan, rows = make_plan(parts[0].config.plan, parts[0].stack.ids), rows_each(parts[0].config)

        def profiled(in_slices: bool) -> list[Profile]:
            options = {"policies": POLICIES, "in_slices": in_slices}
            return [analyze(*each.for_profile, (rows, 2 * rows), device, **each.profile_options | options) for each in parts]

        slices: Sequence[jpipe.plan.Slices | None] = SLICES if plan.slices is None else (plan.slices,)
        why = list[str]()
        try:
            for each in slices:
                varied(plan, each, None)
            profiles = profiled(True)
        except InputError as error:
            if plan.slices is not None:
                raise
            problem, slices, profiles = error.problems[0], (None,), profiled(False)
            why = [f"whole rows only, because slices need {problem.expected}, found {problem.found}" if problem.expected else str(error)]
        policies = POLICIES if parts[0].config.plan.recompute == "auto" else (None,)
        cells = [[cell_of(varied(plan, each, policy), profiles, rows, limit) for policy in policies] for each in slices]
        best = max((cell for row in cells for cell in row), key=lambda cell: cell.tokens)
        compiled = compiled_tokens(best, lambda tokens: Parts.of(config_of(tokens), silent), rows, limit, compiling)
    head = ["slices", *(policy or "as in the plan" for policy in policies)]
    named = ["1" if each is None else str(row[0].plan.counted.row_slices) for each, row in zip(slices, cells, strict=True)]
    below = f"below {LENGTHS[0]:,}"
    table = [[name, *(f"{cell.tokens:,}" if cell.tokens else below for cell in row)] for name, row in zip(named, cells, strict=True)]
    return [
        f"tokens of the longest rows, {rows} in a microbatch, in {plan.depth} stages of {plan.schedule} on {device.name}:",
        *align([head, *table]),
        "",
        f"predicted from single layers that are compiled for the target, in multiples of {STEP:,}; a rank may use {decimal(int(limit))}",
        *why,
        *compiled,
    ]


def rows_each(config: Config) -> int:
    """Return the rows of a microbatch."""
    return max(config.train.batch_size // config.plan.microbatches, 1)


def varied(plan: jpipe.Plan, slices: object, policy: str | None) -> jpipe.Plan:
    """Return the plan with these slices, and this recomputation of all stages, or its own for None."""
    stages = [stage if policy is None else stage.model_copy(update={"recompute": policy}) for stage in plan.stages]
    return jpipe.Plan(**{name: getattr(plan, name) for name in jpipe.Plan.model_fields} | {"stages": stages, "slices": slices})


def peaks_of(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost]) -> tuple[int, ...]:
    """Return the peak memory of each rank in steady state, in bytes."""
    batches = 2 * jpipe.programs.batches_until_full(plan) + 2
    return tuple(jpipe.simulate(jpipe.lower(plan, batches, **jpipe.programs.uses_by_costs(costs)), costs).peak_bytes)


def cell_of(plan: jpipe.Plan, profiles: Sequence[Profile], rows: int, limit: float) -> Cell:
    """Return the longest rows of a plan, as predicted from profiles for `LENGTHS`."""
    peaks = tuple(peaks_of(plan, profile.stage_costs(plan, rows)) for profile in profiles)
    return Cell(plan, peaks, longest(peaks, limit))


def longest(peaks: Sequence[Sequence[int]], limit: float) -> int:
    """Return the most tokens with which all ranks are within the limit, if the memory of each grows linearly.

    Return 0 below the shortest rows of a profile: shorter rows may use another attention, so their memory is not on the line.
    """
    most = []
    for low, high in zip(*peaks, strict=True):
        slope = max(high - low, 1) / (LENGTHS[1] - LENGTHS[0])
        most.append(LENGTHS[0] + (limit - low) / slope)
    tokens = int(min(most) // STEP) * STEP
    return tokens if tokens >= LENGTHS[0] else 0


def compiled_tokens(cell: Cell, parts_of: Callable[[int], Parts], rows: int, limit: float, compiling: Compiling) -> list[str]:
    """Return a line about the longest rows with which the fullest rank of the plan fits into `limit` bytes.

    It is compiled for these rows, and for shorter or longer ones while the prediction was wrong. `parts_of` returns the model for rows with
    this number of tokens.
    """
    tokens, fitting, how = cell.tokens, dict[int, int](), words(cell.plan)
    tried = list[int]()
    while tokens and tokens not in tried and len(tried) < COMPILED:
        tried.append(tokens)
        share = (tokens - LENGTHS[0]) / (LENGTHS[1] - LENGTHS[0])
        predicted = [low + share * (high - low) for low, high in zip(*cell.peaks, strict=True)]
        fullest = max(range(len(predicted)), key=predicted.__getitem__)
        peak = compiled_peak(cell.plan, parts_of(tokens), rows, fullest, compiling)
        if peak <= limit:
            fitting[tokens] = peak
        low = cell.peaks[0][fullest]
        if tokens <= LENGTHS[0] or peak <= low or limit <= low:
            break
        tokens = int((LENGTHS[0] + (limit - low) / (peak - low) * (tokens - LENGTHS[0])) // STEP) * STEP
    if not tried:
        return []
    if not fitting:
        return [f"none of {', '.join(f'{each:,}' for each in tried)} tokens fits {how}, compiled"]
    most = max(fitting)
    return [f"compiled: {most:,} tokens {how} need {decimal(fitting[most])} of {decimal(int(limit))} on the fullest rank"]


def words(plan: jpipe.Plan) -> str:
    """Return the slices and the recomputation of a plan as words."""
    count, policies = plan.counted.row_slices, ", ".join(dict.fromkeys(stage.recompute for stage in plan.stages))
    return ("in whole rows" if count == 1 else f"in {count} slices") + f" with recompute {policies}"


def compiled_peak(plan: jpipe.Plan, parts: Parts, rows: int, rank: int, compiling: Compiling) -> int:
    """Return the peak memory of a rank with the compiled scratch memory of the last slice, which attends to all positions."""
    costs, device = [*parts.pipeline(plan).costs(parts.rows(rows * plan.microbatches))], compiling.devices[0]
    model, rules = Model(*parts.for_profile, (rows,), **parts.profile_options), jpipe.schedules.SCHEDULES[plan.schedule]
    stages = [model.stage(stage.layers, rows, stage.recompute) for stage in plan.resolved("gpu").stages]
    last = stages if plan.slices is None else jpipe.stages.in_slices(plan, model.batches[rows], stages)[-1]
    for s in plan.pipeline_ranks[rank]:
        names: Sequence[Name] = ("forward_backward",) if rules.begins_fused(plan.counted, s) else KINDS
        scratch = max(compile_program(last[s].trace(name, device, any_layout=True).lower(), device)[0] for name in names)
        slices = tuple(dataclasses.replace(cost, temporary=scratch) for cost in costs[s].by_slice)
        costs[s] = dataclasses.replace(costs[s], temporary=scratch, by_slice=slices)
    return peaks_of(plan, costs)[rank]
