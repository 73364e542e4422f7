"""`jpipe plan`: search for a plan, print the candidates, and write and draw the best one."""

import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import jax
from rich.console import Console

from jpipe import InputError
from jpipe.context import tracing_for
from jpipe.files import expanded, write_atomically, writing
from jpipe_planner import Plans, Profile, Topology, draw_choice, local_topology
from jpipe_planner.machine.compiling import compiling_for
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import Ranked
from jpipe_planner.ranking.find import Compiled
from jpipe_train.assemble.build import check_by_reading
from jpipe_train.config import config_file
from jpipe_train.config.config import AUTO, Config
from jpipe_train.config.section import MOST_ROWS
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.launch.team import Team, facts, joined
from jpipe_train.plan import trial
from jpipe_train.plan.compiling import compiled_words, compiler_errors, confirm, nothing_fits, of_this_machine
from jpipe_train.plan.inputs import Request, prepare_devices, read_profile, read_topology
from jpipe_train.plan.profiling import Parts, cores_of, profile_of, profile_together
from jpipe_train.plan.request import LOCAL
from jpipe_train.plan.search import refused_schedules, search

SHOWN = 10  # the most rows of the table
EXPLAINED = 20  # the most rejected plans that are listed


def main(request: Request, connect_limit: float = 300.0, wait_limit: float = 45.0, connect: Callable[[], int] = lambda: 1) -> None:
    """Find the best plan, print it, and write it.

    `connect` connects the processes, if the plan is for their devices, and returns their number. Process 0 searches, prints and writes.

    Raises:
        InputError: an option is wrong, or no plan fits. Then nothing was written.
        jpipe.PeerLost: another process died, hung or stopped.
    """
    _check(request)
    num_processes = connect() if request.topology == LOCAL else 1
    with joined(num_processes, connect_limit, wait_limit) as team:
        console = Console(highlight=False, quiet=not team.is_first)
        if not console.is_terminal:
            console.width = 180
        reporter = Reporter(1, 1, "samples", console)
        config = None
        if request.config is not None:
            changes, source = (*request.overrides, f"plan.file={AUTO}"), request.config
            config = team.run_on_all(lambda: config_file.load(source, changes, allow_code=request.allow_code))
            planned = replace(request, config=None, out=None, profile_out=None, png=None)
            team.agree(lambda: facts(config) | {"what is planned": str(planned)})
        team.run_on_all(lambda: _check_by_reading(request, config, team))
        devices = team.run_on_all(lambda: prepare_devices(request, num_processes))
        team.start_devices(connect_limit)
        parts = team.run_on_all(lambda: None if config is None else Parts.of(config, reporter))
        request = request.with_extras(None) if parts is None else parts.complete(request, team)
        found = _find(request, parts, devices, reporter, team)
        team.run_on_all(lambda: None if found is None else _finish(request, parts, reporter, *found))


_Found = tuple[Plans, trial.Measured | None, str]
"""The plans, the best first; the plans that ran with `--measure`; words about how the memory of the compiled plans was determined."""


def _find(request: Request, parts: Parts | None, devices: int | None, reporter: Reporter, team: Team) -> _Found | None:
    """Profile, search, confirm and measure. Return the result in process 0, and None in the other processes."""
    if (batch := request.batch) is None:
        raise InputError("--batch: a profile does not say how many rows a batch has; give their number")
    profile, topology = _profile_and_topology(request, parts, batch, devices, reporter, team)

    def searched() -> Plans:
        global_norm = parts is not None and parts.config.uses_global_norm
        with reporter.phase(f"searching plans for {count(topology.num_devices, 'device')} and a batch of {table.rows_of(batch)}"):
            return search(profile, topology, batch, request, global_norm, reporter)

    if parts is None:
        plans = searched()
        if not plans.choice.ranked:
            raise nothing_fits(plans.choice)
        return plans, None, ""
    if request.topology == LOCAL:
        compiling = of_this_machine()
    else:
        compiling = compiling_for(topology.device, request.most_in_mesh(topology))
    known_by, found = compiled_words(compiling), list[Plans]()

    def find() -> Plans:
        plans = searched()
        phase = reporter.phase(f"compiling the stages of the best plan for {compiling.kind}")
        with phase, tracing_for(compiling.devices[0].platform), compiler_errors(compiling.kind):
            found.append(confirm(plans, parts, compiling, lambda attempt: reporter.say(table.attempt(attempt))))
        return found[0]

    if request.measure is not None:
        measured = trial.measure(find, parts, request.measure, reporter, team)
        return None if measured is None else (measured.result, measured, known_by)
    team.from_first("the plan", lambda: find().choice.topology.name, trial.LONGEST)
    return (found[0], None, known_by) if found else None


def _finish(
    request: Request, parts: Parts | None, reporter: Reporter, plans: Plans, measured: trial.Measured | None, known_by: str
) -> None:
    """Print the result of a search, and write its files."""
    choice = plans.choice
    _report(request, reporter, plans, measured, known_by)
    configured = None if parts is None else parts.config.plan.agree
    if choice.ranked[0].candidate.agree is None and (request.agree is not None or configured is not None):
        reporter.say("agree has no effect: the chosen plan has only one pipeline")
    if request.explain:
        reporter.say("why it was chosen, against the best plans of other kinds:")
        rows = table.why_chosen(choice, SHOWN)
        if measured is not None:
            pairs = zip(rows, choice.ranked, strict=False)
            rows = [(*row[:-1], trial.why(measured, ranked) or row[-1]) for row, ranked in pairs]
        reporter.table(table.WHY_HEAD, rows, table.WORDS)
        for line in table.why_rejected(choice, EXPLAINED) or ["all kinds of plans fit"]:
            reporter.say(line)
    _write(reporter, request, plans)
    if request.out is not None and request.config is not None and parts is not None and not _other_targets(choice.topology):
        planned = choice.ranked[0].candidate.batch
        kept = [
            override for override in request.overrides if not override.startswith(("plan.agree", "plan.links", "plan.slices"))
        ]  # they are in the plan
        changes = [*kept, *([] if planned == parts.config.train.batch_size else [f"train.batch_size={planned}"])]
        command = ["jpipe", "train", request.config, "--plan", request.out, *(word for change in changes for word in ("--set", change))]
        reporter.say(f"train with it: {shlex.join(command)}")


def _check(request: Request) -> None:
    if request.config is None and request.profile is None:
        raise InputError(where="plan", expected="a CONFIG or --profile FILE", found="neither", change="name one")
    if request.devices is not None and request.topology != LOCAL:
        raise InputError(f"--devices: '{request.topology}' already gives the devices; leave out --devices, or change the file")
    if request.pipedream is not None and "pipedream" not in request.allowed:
        raise InputError("--pipedream: expected pipedream among --schedules, found " + ", ".join(request.schedules))
    if request.measure is not None and (request.config is None or request.topology != LOCAL):
        found = "--profile alone" if request.config is None else f"--topology {request.topology}"
        raise InputError(f"--measure: expected a CONFIG and --topology local, so that plans can run here, found {found}; leave it out")
    if request.config is None and request.topology == LOCAL:
        raise InputError(
            "--topology: a profile is planned for machines that a file describes; name one, such as configs/topologies/cluster-a.yaml"
        )
    for option in ("batch", "devices", "rows", "measure", "agree"):
        value = getattr(request, option)
        if value is not None and value < 1:
            raise InputError(f"--{option}: expected 1 or more, found {value}")
        if value is not None and value > MOST_ROWS:
            raise InputError(f"--{option}: expected at most {MOST_ROWS:,}, found {value:,}; is it a typo?")
    if request.rows is not None and (request.profile is None or Path(request.profile).suffix != ".txt"):
        raise InputError(
            "--rows: is only for a --profile that is a graph.txt, because that file does not say how many rows a microbatch has; "
            "remove --rows"
        )
    if request.max_delay is not None and not 0 <= request.max_delay < math.inf:
        raise InputError(where="--max-delay", expected="0 or more updates", found=f"{request.max_delay:g}")
    _ = request.degrees, request.allowed  # raise InputError for a text that names no mesh or no schedule
    for option, path, ending in (
        ("--out", request.out, ".json"),
        ("--profile-out", request.profile_out, ".json"),
        ("--png", request.png, ".png"),
    ):
        if path is not None and Path(path).suffix.lower() != ending:
            raise InputError(where=option, expected=f"a name that ends in {ending}", found=f"'{path}'")
        if path is not None and not expanded(path, option).absolute().parent.is_dir():
            raise InputError(f"{option}: there is no folder for '{path}'; make it first, or choose another")


def _check_by_reading(request: Request, config: Config | None, team: Team) -> None:
    """Check the config, the topology and the profile before devices start, data are read or layers are profiled."""
    if request.topology != LOCAL:
        read_topology(request.topology)
    if request.profile is not None and team.is_first:
        read_profile(request.profile, request.rows or 1)
    if config is not None:
        refused_schedules(request.with_extras(config.plan), config.uses_global_norm)
        check_by_reading(config)


def _profile_and_topology(
    request: Request, parts: Parts | None, batch: int, devices: int | None, reporter: Reporter, team: Team
) -> tuple[Profile, Topology]:
    """Read or measure the profile and the topology. Only in process 0 does a measured topology have its links."""
    topology = read_topology(request.topology) if request.topology != LOCAL else None
    local = jax.device_count() if topology is None and devices is None else devices or 1
    if request.profile is not None:
        file, rows = request.profile, request.rows or 1
        if team.processes is None:
            profile = read_profile(file, rows)
        else:
            profile = Profile.from_json(team.from_first("the profile", lambda: read_profile(file, rows).to_json()))
        if request.rows is None and Path(file).suffix == ".txt":
            reporter.say("microbatches of 1 row: say how many with --rows")
        if parts is not None:
            ids, ties = parts.stack.ids, parts.stack.ties
            team.run_on_all(lambda: profile.check_layers(ids, [*ties.sharers(ids).values()]))
    else:
        assert parts is not None
        if topology is None:
            profile = profile_together(parts, batch, local, reporter, team)
        else:
            profile = profile_of(parts, topology, batch, topology.num_devices, reporter, request.most_in_mesh(topology))
    if topology is None:
        assert parts is not None
        lines = list[str]()
        with reporter.phase("measuring what this machine computes and moves at once"):
            topology = local_topology(local, cores=cores_of(parts, profile, local, team), report=lines.append)
        for line in (table.links(topology), *lines):
            reporter.say(line)
    elif topology.num_devices > 1:
        reporter.say(f"overlap: not measured; plans assume: {topology.device.overlap}")
    return profile, topology


def _report(request: Request, reporter: Reporter, plans: Plans, measured: trial.Measured | None, known_by: str) -> None:
    choice = plans.choice
    profile, topology, chosen = choice.profile, choice.topology, choice.ranked[0]
    confirmed = plans.compiled[0] if plans.compiled else None
    if others := _other_targets(topology):
        kinds = ", ".join(sorted({topology.device.target or topology.device.name, *map(str, others)}))
        reporter.say(
            f"these plans cannot be run: they are for devices of different kinds, {kinds}, but all devices of a run are of one kind; to "
            "train, plan for devices of one kind"
        )
    target = topology.device.compiles_for
    compiled_for = f" compiled for {profile.compiled_for}" if target and profile.compiled_for not in ("", target.name) else ""
    reporter.say(
        f"{topology.name or 'topology'}: {table.devices(topology)}; {profile.source} profile of "
        f"{count(len(profile.layers), 'layer')}{compiled_for}; {choice.considered:,} candidates"
    )
    reporter.table(table.head(choice), table.rows(choice, SHOWN), table.WORDS)
    first = "row" if len(plans.compiled) < 2 else count(len(plans.compiled), "row")
    few = ", extrapolated from stages of fewer equal layers" if any(one.extrapolated for one in plans.compiled) else ""
    compiled = f"estimated except in the first {first}, {known_by}{few}"
    reporter.say(table.legend(choice, SHOWN, "estimated" if confirmed is None else compiled))
    if words := table.no_pipeline(choice):
        reporter.say(words)
    for line in table.price_of_flush(choice if measured is None else measured.searched.choice, plans.delayed):
        reporter.say(line)
    candidate = chosen.candidate
    if candidate.devices < topology.num_devices:
        reporter.say(f"it uses {candidate.devices} of {count(topology.num_devices, 'device')}; the remaining devices stay idle")
    if measured is not None and measured.trials:
        reporter.say(f"measured time per step: the median of {count(trial.ROUNDS, 'round')} of each plan, always with the same batch:")
        reporter.table(trial.HEAD, trial.rows(measured), table.WORDS)
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
    if candidate.batch != request.batch:
        reporter.say(f"the plan has {table.rows_of(candidate.batch)} between two updates, in place of {request.batch}")


def _other_targets(topology: Topology) -> set[str | None]:
    """Return the targets of the devices that are of another kind than the usual device."""
    return {one.target for one in topology.differing if one.target not in (None, topology.device.target)}


def _memory(chosen: Ranked, confirmed: Compiled | None, p: int) -> str:
    """Describe the peak memory of a rank and its parts, with the error of the estimate if the rank's stages are compiled."""
    peak, parts = chosen.memory[p], ""
    if chosen.simulated is not None:
        held = chosen.candidate.most_of_replicas(chosen.simulated.held_bytes)[p]
        parts = f" (held {table.size(held)}, temporary {table.size(peak - held)})"
    if confirmed is None or p not in confirmed.ranks:
        return f"estimated peak memory {table.size(peak)}{parts}"
    return f"peak memory {table.size(peak)}{parts}, estimated {table.size(confirmed.estimated[p])} ({confirmed.errors[p]:+.1%})"


def _write(reporter: Reporter, request: Request, plans: Plans) -> None:
    choice, chosen = plans.choice, plans.choice.ranked[0]
    written: list[tuple[str, str, str | bytes]] = []
    if request.png is not None:
        image = BytesIO()
        draw_choice(choice, plans.tried.values(), chosen).savefig(image, format="png")
        written.append(("--png", request.png, image.getvalue()))
    if request.profile_out is not None:
        written.append(("--profile-out", request.profile_out, choice.profile.to_json()))
    if request.out is not None:
        written.append(("--out", request.out, choice.plan(chosen).to_json()))
    for option, path, content in written:
        with writing(option, path):
            write_atomically(expanded(path, option), content)
    if written:
        reporter.say("written: " + ", ".join(path for _, path, _ in written))
