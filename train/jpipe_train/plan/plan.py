"""`jpipe plan`: search for a plan, print the candidates, and write and draw the best one."""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import jax
from rich.console import Console

import jpipe
from jpipe import InputError
from jpipe.context import tracing_for
from jpipe.files import expanded, write_atomically
from jpipe_lm.models.blockwise import LONG
from jpipe_planner import Profile, Topology, draw_choice, local_topology
from jpipe_planner.machine.compiling import Compiling, compiling_for
from jpipe_planner.machine.overlap import assumed_words
from jpipe_planner.profile.sharded import NO_MESH
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.ranking.compiled import Compiled
from jpipe_planner.ranking.price_of_flush import PriceOfFlush, price_of_flush
from jpipe_train.assemble.build import check_by_reading
from jpipe_train.config import config_file
from jpipe_train.config.config import AUTO, Config
from jpipe_train.config.section import MOST_ROWS
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.launch.together import Together, facts, joined
from jpipe_train.plan import trial, trial_words
from jpipe_train.plan.compiling import compiled_words, compiler_errors, of_this_machine
from jpipe_train.plan.confirm import confirm, nothing_fits
from jpipe_train.plan.inputs import ALL, LOCAL, Request, prepare_devices, read_profile, read_topology
from jpipe_train.plan.profiling import Parts, cores_of, profile_of, profile_together
from jpipe_train.plan.search import SearchResult, refused_schedules, search

SHOWN = 10  # rows of the table
EXPLAINED = 20  # rejected plans that are listed


@dataclass(frozen=True)
class Files:
    """The files to read and write, each optional.

    Attributes:
        config: the config of a run.
        profile: an existing profile, instead of a config, or with one to save the profiling.
        out: the plan to write.
        profile_out: the profile to write.
        png: the picture to write.
    """

    config: str | None = None
    profile: str | None = None
    out: str | None = None
    profile_out: str | None = None
    png: str | None = None


def main(
    files: Files,
    request: Request,
    overrides: tuple[str, ...] = (),
    rows: int | None = None,
    explain: bool = False,
    allow_code: bool = False,
    connect_limit: float = 300.0,
    wait_limit: float = 45.0,
    connect: Callable[[], int] = lambda: 1,
) -> None:
    """Find the best plan, print it, and write it.

    Args:
        files: the files to read and write.
        request: the request for a plan.
        overrides: `key=value` for the config.
        rows: rows of a microbatch of a `graph.txt`; None for 1.
        explain: whether to explain the choice and list the plans that do not fit.
        allow_code: whether to import and run the functions that a config names.
        connect_limit: as in `jpipe_train.run.loop.main`, in seconds.
        wait_limit: as there, in seconds.
        connect: connects the processes, if it is for their devices, and returns their number; process 0 searches, prints and writes.

    Raises:
        InputError: something does not fit; nothing was written.
        jpipe.PeerLost: another process died, hung or stopped.
    """
    _check(files, request, rows)
    num_processes = connect() if request.topology == LOCAL else 1
    with joined(num_processes, connect_limit, wait_limit) as together:
        reporter = _reporter(quiet=not together.is_first)
        config = together.run_on_all(lambda: _config(files, overrides, allow_code))
        if config is not None:
            together.agree(lambda: facts(config) | {"what is planned": f"{request}, --profile {files.profile}, --rows {rows}"})
        together.run_on_all(lambda: _check_by_reading(files, request, config, rows, together))
        devices = together.run_on_all(lambda: prepare_devices(request, num_processes))
        together.start_devices(connect_limit)
        parts = together.run_on_all(lambda: None if config is None else Parts.of(config, reporter))
        found = _find(files, _completed(request, parts, together), parts, devices, rows, reporter, together)
        together.run_on_all(lambda: None if found is None else _finish(files, request, overrides, found, parts, explain, reporter))


def _reporter(*, quiet: bool) -> Reporter:
    console = Console(highlight=False, quiet=quiet)
    return Reporter(1, 1, "samples", console if console.is_terminal else Console(highlight=False, width=180, quiet=quiet))


@dataclass(frozen=True)
class _Found:
    """What was found.

    Attributes:
        result: the plans, the best first.
        confirmed: the memory of the first one; None where its stages are not compiled.
        measured: the plans that ran; None without `--measure`.
        batch: rows between two updates that were asked for.
        known_by: how the memory of the first plans is known.
    """

    result: SearchResult
    confirmed: Compiled | None
    measured: trial.Measured | None
    batch: int
    known_by: str


def _config(files: Files, overrides: tuple[str, ...], allow_code: bool) -> Config | None:
    if files.config is None:
        return None
    return config_file.load(files.config, (*overrides, f"plan.file={AUTO}"), allow_code=allow_code)


def _completed(request: Request, parts: Parts | None, together: Together) -> Request:
    """Complete the request from the config and the number of processes."""
    if parts is None:
        return request.with_asked(None)
    return replace(
        request.with_asked(parts.config.plan),
        batch=request.batch or parts.config.train.batch_size,
        replicas=not parts.stack.carries_rows,
        max_delay=parts.config.plan.max_delay if request.max_delay is None else request.max_delay,
        share_optimizer=parts.config.optimizer.ema_decay is None,
        all_devices=together.processes is not None,
    )


def _find(
    files: Files, request: Request, parts: Parts | None, devices: int | None, rows: int | None, reporter: Reporter, together: Together
) -> _Found | None:
    """Search, confirm and measure; return what was found, and None in other processes than process 0."""
    if (batch := request.batch) is None:
        raise InputError("--batch: a profile does not say how many rows a batch has; give their number")
    profile, topology = _profile_and_topology(files, request, parts, batch, devices, rows, reporter, together)
    if parts is None:
        result = _searched(profile, topology, batch, request, False, reporter)
        if not result.choice.ranked:
            raise nothing_fits(result.choice)
        return _Found(result, None, None, batch, "estimated")
    compiling = compiling_of(request, topology)
    known_by, confirmed = compiled_words(parts.config, compiling), list[tuple[SearchResult, list[Compiled]]]()

    def find() -> tuple[SearchResult, list[Compiled]]:
        result = _searched(profile, topology, batch, request, parts.config.uses_global_norm, reporter)
        phase = reporter.phase(f"compiling the stages of the best plan for {compiling.kind}")
        with phase, tracing_for(compiling.devices[0].platform), compiler_errors(compiling.kind):
            confirmed.append(confirm(result, parts, compiling, lambda attempt: reporter.say(table.attempt(attempt))))
        return confirmed[0]

    if request.measure is not None:
        measured = trial.measure(find, parts, request.measure, reporter, together)
        return None if measured is None else _Found(measured.result, measured.chosen, measured, batch, known_by)
    together.from_first("the plan", lambda: find()[0].choice.topology.name, trial.LONGEST)
    return _Found(confirmed[0][0], confirmed[0][1][0], None, batch, known_by) if confirmed else None


def _searched(profile: Profile, topology: Topology, batch: int, request: Request, global_norm: bool, reporter: Reporter) -> SearchResult:
    with reporter.phase(f"searching plans for {count(topology.num_devices, 'device')} and a batch of {table.rows_of(batch)}"):
        return search(profile, topology, batch, request, global_norm, reporter)


def _finish(
    files: Files, request: Request, overrides: tuple[str, ...], found: _Found, parts: Parts | None, explain: bool, reporter: Reporter
) -> None:
    """Print what was found, and write it."""
    result, measured = found.result, found.measured
    _report(reporter, result, found.confirmed, found.batch, found.known_by, measured)
    configured = None if parts is None else parts.config.plan.agree
    if result.choice.ranked[0].candidate.agree is None and (request.agree is not None or configured is not None):
        reporter.say("agree has no effect: the chosen plan has only one pipeline")
    if parts is not None and request.topology != LOCAL and (words := attention_words(parts.config, result.choice)):
        reporter.say(words)
    if explain:
        _explain_choice(reporter, result, measured)
        for line in table.why_rejected(result.choice, EXPLAINED) or ["all kinds of plans fit"]:
            reporter.say(line)
    _write(reporter, files, result, result.choice.profile if measured is None else measured.profile)
    if files.out is not None and files.config is not None and parts is not None:
        planned = result.choice.ranked[0].candidate.batch
        kept = [override for override in overrides if not override.startswith(("plan.agree", "plan.links"))]  # they are in the plan
        changes = [*kept, *([] if planned == parts.config.train.batch_size else [f"train.batch_size={planned}"])]
        command = ["jpipe", "train", files.config, "--plan", files.out, *(word for change in changes for word in ("--set", change))]
        reporter.say(f"train with it: {shlex.join(command)}")


def _check(files: Files, request: Request, rows: int | None) -> None:
    if files.config is None and files.profile is None:
        raise InputError("plan: expected a CONFIG or --profile FILE, found neither; name one")
    if request.devices is not None and request.topology != LOCAL:
        raise InputError(f"--devices: '{request.topology}' says how many there are; leave it out, or change the file")
    if request.pipedream is not None and "pipedream" not in request.allowed:
        raise InputError("--pipedream: expected pipedream among --schedules, found " + ", ".join(request.schedules))
    if request.measure is not None and (files.config is None or request.topology != LOCAL):
        found = "--profile alone" if files.config is None else f"--topology {request.topology}"
        raise InputError(f"--measure: expected a CONFIG and --topology local, so that plans can run here, found {found}; leave it out")
    if files.config is None and request.topology == LOCAL:
        raise InputError(
            "--topology: a profile is planned for machines that a file describes; name one, such as configs/topologies/cluster-a.yaml"
        )
    for option, value in (
        ("--batch", request.batch),
        ("--devices", request.devices),
        ("--rows", rows),
        ("--measure", request.measure),
        ("--agree", request.agree),
    ):
        if value is not None and value < 1:
            raise InputError(f"{option}: expected 1 or more, found {value}")
        if value is not None and value > MOST_ROWS:
            raise InputError(f"{option}: expected at most {MOST_ROWS:,}, found {value:,}; is it a typo?")
    if rows is not None and (files.profile is None or Path(files.profile).suffix != ".txt"):
        raise InputError("--rows: is for a graph.txt named by --profile, which does not say it; leave it out")
    if request.max_delay is not None and not 0 <= request.max_delay < math.inf:
        raise InputError(f"--max-delay: expected 0 or more updates, found {request.max_delay:g}")
    _ = request.degrees  # raises InputError for a text that names no mesh
    for name in request.schedules:
        if name not in (ALL, *jpipe.schedules.SCHEDULES):
            raise InputError(f"--schedules: unknown schedule '{name}'; {jpipe.errors.nearest(name, (ALL, *jpipe.schedules.SCHEDULES))}")
    for option, path, ending in (
        ("--out", files.out, ".json"),
        ("--profile-out", files.profile_out, ".json"),
        ("--png", files.png, ".png"),
    ):
        if path is not None and Path(path).suffix.lower() != ending:
            raise InputError(f"{option}: expected a name that ends in {ending}, found '{path}'")
        if path is not None and not expanded(path, option).absolute().parent.is_dir():
            raise InputError(f"{option}: there is no folder for '{path}'; make it first, or choose another")


def _check_by_reading(files: Files, request: Request, config: Config | None, rows: int | None, together: Together) -> None:
    """Check config, topology and profile before devices start, data are read or layers are profiled."""
    if request.topology != LOCAL:
        read_topology(request.topology)
    if files.profile is not None and together.is_first:
        read_profile(files.profile, rows or 1)
    if config is not None:
        refused_schedules(request.with_asked(config.plan), config.uses_global_norm)
        check_by_reading(config)


def compiling_of(request: Request, topology: Topology) -> Compiling:
    """Return the devices to compile for: the target of a topology file, or this machine's devices if the plan is for it."""
    if request.topology == LOCAL:
        return of_this_machine()
    degrees = request.degrees
    return compiling_for(topology.device, topology.most_in_mesh if degrees is None else max(mesh.size for mesh in degrees))


def _profile_and_topology(
    files: Files,
    request: Request,
    parts: Parts | None,
    batch: int,
    devices: int | None,
    rows: int | None,
    reporter: Reporter,
    together: Together,
) -> tuple[Profile, Topology]:
    """Read or measure the profile and the topology; all processes get the same."""
    topology = read_topology(request.topology) if request.topology != LOCAL else None
    local = jax.device_count() if topology is None and devices is None else devices or 1
    if files.profile is not None:
        file = files.profile
        if together.processes is None:
            profile = read_profile(file, rows or 1)
        else:
            profile = Profile.from_json(together.from_first("the profile", lambda: read_profile(file, rows or 1).to_json()))
        if rows is None and Path(file).suffix == ".txt":
            reporter.say("microbatches of 1 row: say how many with --rows")
        if parts is not None:
            ids, ties = parts.stack.ids, parts.stack.ties
            together.run_on_all(lambda: profile.check_layers(ids, [*ties.sharers(ids).values()]))
    elif topology is None:
        assert parts is not None
        profile = profile_together(parts, batch, local, reporter, together)
    else:
        assert parts is not None
        degrees_to_try = request.degrees or (NO_MESH,)
        largest = topology.most_in_mesh if request.degrees is None else max(degrees.size for degrees in degrees_to_try)
        profile = profile_of(parts, topology, batch, topology.num_devices, reporter, largest)
    if topology is None:
        assert parts is not None
        lines = list[str]()
        with reporter.phase("measuring what this machine computes and moves at once"):
            topology = local_topology(local, cores=cores_of(parts, profile, local, together), report=lines.append)
        for line in (table.links(topology), *lines):
            reporter.say(line)
    elif topology.num_devices > 1:
        reporter.say(assumed_words(topology.device.overlap))
    return profile, topology


def _report(
    reporter: Reporter, result: SearchResult, confirmed: Compiled | None, batch: int, known_by: str, measured: trial.Measured | None
) -> None:
    choice = result.choice
    profile, topology, chosen = choice.profile, choice.topology, choice.ranked[0]
    if kinds := other_kinds(topology):
        reporter.say(
            f"these plans cannot be run: they are for devices of different kinds, {kinds}, and the devices of a run are of one kind; plan "
            "for the devices of one kind to train"
        )
    reporter.say(
        f"{topology.name or 'topology'}: {table.devices(topology)}; {profile.source} profile of "
        f"{count(len(profile.layers), 'layer')}{_compiled_for(profile, topology)}; {choice.considered:,} candidates"
    )
    rows, head = table.rows(choice, SHOWN), table.head(choice)
    if measured is not None:
        head = (*head, *trial_words.HEAD)
        rows = [(*row, *trial_words.cells(measured, ranked)) for row, ranked in zip(rows, choice.ranked, strict=False)]
    reporter.table(head, rows, table.WORDS)
    compiled = f"estimated except in the first {'row' if result.compiled < 2 else count(result.compiled, 'row')}, {known_by}"
    reporter.say(table.legend(choice, SHOWN, "estimated" if confirmed is None else compiled))
    if words := table.no_pipeline(choice):
        reporter.say(words)
    if cost := price_of_flush(choice if measured is None else measured.searched.choice, result.delayed):
        for line in _price_words(cost, only_flushing=cost.asynchronous is result.delayed):
            reporter.say(line)
    for line in table.signs(choice, SHOWN):
        reporter.say(line)
    candidate = chosen.candidate
    if candidate.devices < topology.num_devices:
        reporter.say(f"it uses {candidate.devices} of {count(topology.num_devices, 'device')}; the remaining devices stay idle")
    _report_measured(reporter, measured)
    reporter.say(f"chosen: {table.name(candidate)}" + (f", mean delay {table.delay(candidate)}" if candidate.delay else ""))
    plan = choice.plan(chosen)
    devices = plan.predicted.devices if plan.predicted is not None else ()
    of_stage = {s: f" on {words}" for stages, words in zip(plan.pipeline_ranks, devices, strict=False) for s in stages}
    for s, stage in enumerate(plan.stages):
        layers = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} … {stage.layers[-1]}"
        replicas = f" × {stage.replicas}" if stage.replicas > 1 else ""
        replicas += (f" on {stage.devices_each} devices ({candidate.degrees})" if stage.mesh else "") + of_stage.get(s, "")
        memory = "" if candidate.chunks > 1 else f"; {_memory(chosen, confirmed, s)}"
        reporter.say(f"  stage {s}{replicas}: {layers}; recompute {stage.recompute}{memory}")
    if candidate.chunks > 1:
        for p, stages in enumerate(plan.pipeline_ranks):
            reporter.say(f"  rank {p}: stages {', '.join(map(str, stages))}; {_memory(chosen, confirmed, p)}")
    if confirmed is None:
        reporter.say("memory is estimated from the profile; with a CONFIG the stages are compiled to know it")
    if candidate.batch != batch:
        reporter.say(f"the plan has {table.rows_of(candidate.batch)} between two updates, in place of {batch}")


def _price_words(cost: PriceOfFlush, *, only_flushing: bool) -> list[str]:
    """Compare the best plan that flushes with the best asynchronous one; if none was considered, describe how to get one."""
    if not only_flushing or cost.is_free:
        return table.price(cost)
    return [
        f"only schedules that flush were considered; {table.name(cost.asynchronous.candidate)}, with delayed weights, would be about "
        f"{cost.ratio - 1:.0%} faster: --schedules all compares these, too, and --max-delay bounds the delay",
        *table.price(cost),
    ]


def other_kinds(topology: Topology) -> str:
    """Return the names of a topology's kinds of devices, if there are several."""
    others = {one.target for one in topology.differing if one.target not in (None, topology.device.target)}
    return ", ".join(sorted({topology.device.target or topology.device.name, *map(str, others)})) if others else ""


def _report_measured(reporter: Reporter, measured: trial.Measured | None) -> None:
    """Print the errors of the predictions, if plans ran."""
    if measured is None or not measured.trials:
        return
    reporter.say("how far the predictions are off, for each kind of plan that ran, in time per step:")
    reporter.table(trial_words.ERRORS, trial_words.errors(measured), table.WORDS)
    for line in trial_words.words(measured):
        reporter.say(line)


def _compiled_for(profile: Profile, topology: Topology) -> str:
    """Name the devices for which the profile's scratch memory was compiled, if they are of another kind; else return ""."""
    target = topology.device.compiles_for
    return f" compiled for {profile.compiled_for}" if target and profile.compiled_for not in ("", target.name) else ""


def attention_words(config: Config, choice: Choice) -> str:
    """Describe the memory that XLA's attention holds for all pairs of positions; "" if there is little or none."""
    model, candidate, limit = config.model, choice.ranked[0].candidate, choice.topology.device.limit
    target = choice.topology.device.compiles_for
    if model.target is not None or model.attention != "xla" or model.seq_len >= LONG:
        return ""
    if limit is None or (target is not None and target.platform == "tpu"):
        return ""
    number = 2 if "16" in (config.precision.computes or model.compute_dtype) else 4
    pairs = candidate.rows / candidate.degrees.rows * model.heads / candidate.degrees.model * model.seq_len**2 * number
    if pairs < _WORTH_TELLING * limit:
        return ""
    return (
        f"model.attention is xla: in each block a device holds {table.size(pairs)} for all pairs of positions of a microbatch, from the "
        "forward to the backward unless the stage recomputes; with blockwise on any device, or cudnn on GPUs, it holds none of that, so "
        "memory and scratch memory are less there"
    )


_WORTH_TELLING = 0.001  # share of a device's memory above which the pairs of positions are mentioned


def _memory(chosen: Ranked, confirmed: Compiled | None, p: int) -> str:
    """Return the peak memory of a rank with its parts; if its stages are compiled, also the error of the estimate."""
    peak, persistent = chosen.memory[p], chosen.held
    parts = "" if persistent is None else f" (held {table.size(persistent[p])}, temporary {table.size(peak - persistent[p])})"
    if confirmed is None or p not in confirmed.ranks:
        return f"estimated peak memory {table.size(peak)}{parts}"
    return f"peak memory {table.size(peak)}{parts}, estimated {table.size(confirmed.estimated[p])} ({confirmed.errors[p]:+.1%})"


def _explain_choice(reporter: Reporter, result: SearchResult, measured: trial.Measured | None) -> None:
    """Compare the chosen plan with the best of other kinds."""
    reporter.say("why it was chosen, against the best plans of other kinds:")
    rows = table.why_chosen(result.choice, SHOWN)
    if measured is not None:
        pairs = zip(rows, result.choice.ranked, strict=False)
        rows = [(*row[:-1], trial_words.why(measured, ranked) or row[-1]) for row, ranked in pairs]
    reporter.table(table.WHY_HEAD, rows, table.WORDS)
    if result.plans.left_out:
        many = f"{count(result.plans.left_out, 'plan')} with chunks or split backwards left out"
        reporter.say(f"{many}: simulating them all would take too long; fewer --schedules or a smaller --batch leave less to simulate")


def _write(reporter: Reporter, files: Files, result: SearchResult, profile: Profile) -> None:
    choice, chosen = result.choice, result.choice.ranked[0]
    written: list[tuple[str, str, str | bytes]] = []
    if files.png is not None:
        image = BytesIO()
        draw_choice(choice, result.plans.tried.values(), chosen).savefig(image, format="png")
        written.append(("--png", files.png, image.getvalue()))
    if files.profile_out is not None:
        written.append(("--profile-out", files.profile_out, profile.to_json()))
    if files.out is not None:
        written.append(("--out", files.out, choice.plan(chosen).to_json()))
    for option, path, content in written:
        try:
            write_atomically(expanded(path, option), content)
        except OSError as error:
            raise InputError(f"{option}: cannot write '{path}': {error.strerror}; choose another file") from None
    if written:
        reporter.say("written: " + ", ".join(path for _, path, _ in written))
