"""What `jpipe plan` and `jpipe train --plan auto` do: profile, search, simulate, compile, and say what was found."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jpipe_planner
import numpy as np
import optax
from jpipe_planner import (
    Attempt,
    Candidate,
    Choice,
    Compiled,
    Degrees,
    Meshes,
    Profile,
    Ranked,
    Topology,
    Updates,
    analyze,
    choose,
    compile_stages,
    find_candidates,
    find_variants,
    is_planned,
    measure,
    mesh_refusal,
    mesh_seconds,
    on_meshes,
    planned_schedules,
    possible_degrees,
    read_graph_txt,
    search_parallel,
    sharing_refusal,
    usable_cores,
)
from jpipe_planner.ranking import table

import jpipe
from jpipe import InputError, files
from jpipe.files import expanded
from jpipe_train.assemble import model
from jpipe_train.assemble.build import force_cpu_devices, precision, start_devices
from jpipe_train.assemble.optimizer import optimizer
from jpipe_train.config.config import MOST_MICROBATCHES, Config
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.data import data

MEASURED_SIZES, PAPER_SIZES = 4, 6  # of microbatches to profile: each has to be compiled, and to be run where it is measured
SECONDS = 8.0  # to measure in, compilation apart
LOCAL = "local"
ALL = "all"  # schedules
MANY_DEVICES = 4096  # for which a search is announced as a long one


@dataclass(frozen=True)
class Request:
    """What is to be planned for.

    Attributes:
        topology: a YAML file, or "local": the devices of this machine, their links measured.
        batch: rows between two updates; None: the config's batch size.
        up_to: whether fewer rows than `batch` will do.
        schedules: those to try; "all": all of them; none: those that flush, with which training is as without a pipeline, and pipedream
            if `pipedream` is given.
        devices: how many of "local"; None: all, on CPUs as many as there are cores.
        pipedream: how PipeDream's stages are found, see `jpipe_planner.find_candidates`; None: "batch".
        all_devices: whether none may stay idle, as where each is a process of its own.
        meshes: those of a stage to try, as `jpipe_planner.Degrees.read` takes them; none: those inside a server that the
            profile allows, with a file as the topology, and "local" without meshes.
        replicas: whether stages may have some; not those whose layers carry a state of each row from batch to batch.
    """

    topology: str = LOCAL
    batch: int | None = None
    up_to: bool = False
    schedules: tuple[str, ...] = ()
    devices: int | None = None
    pipedream: Updates | None = None
    all_devices: bool = False
    replicas: bool = True
    meshes: tuple[str, ...] = ()

    @property
    def allowed(self) -> tuple[str, ...]:
        """The schedules to try, by name."""
        every = jpipe.schedules.SCHEDULES
        if self.schedules:
            return tuple(every) if ALL in self.schedules else self.schedules
        asked = {"pipedream"} if self.pipedream is not None else set()
        return tuple(name for name, rules in every.items() if rules.flushes or name in asked)

    @property
    def degrees(self) -> tuple[Degrees, ...] | None:
        """The meshes that are asked for; None: those that a topology and a profile allow.

        Raises:
            InputError: a text that names no mesh.
        """
        named = self.meshes if self.meshes or self.topology != LOCAL else ("none",)
        return tuple(dict.fromkeys(map(Degrees.read, named))) or None


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        choice: the ranking.
        candidates: all that were considered, as estimated.
        known: what simulating or compiling said of some of them.
        left_out: how many plans with chunks or split backwards were not simulated, because all together would take too long.
        delayed: the best plan by its estimate of the schedules that do not flush, if these were not asked for and it is faster.
        compiled: of how many plans at the beginning of the ranking the stages were compiled.
        attempts: the plans whose compiled stages do not fit.
    """

    choice: Choice
    candidates: tuple[Candidate, ...]
    known: dict[Candidate, Ranked]
    left_out: int = 0
    delayed: Candidate | None = None
    compiled: int = 0
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True)
class Parts:
    """The parts of a pipeline that a config names, without the plan."""

    stack: jpipe.LayerStack
    loss: Any
    rule: optax.GradientTransformation
    batch: Any
    config: Config
    precision: jpipe.Precision = dataclasses.field(default_factory=jpipe.Precision)

    @classmethod
    def of(cls, config: Config, reporter: Reporter) -> "Parts":
        """Read from a config; the data is looked at for its shapes."""
        stack = model.layers(config.model, config.train.batch_size, config.precision.computes, config.logits_chunk)
        loss = model.loss(config.loss)
        with reporter.phase("reading the data"):
            batch = jax.tree.map(_spec, data.unread(config).like)
        params = {layer_id: spec.params for layer_id, spec in stack.specs(batch[0]).items()}
        rule = optimizer(config.optimizer, config.train.steps, stack.ties.without_seconds(params))
        return cls(stack, loss, rule, batch, config, precision(config.precision, reporter))

    def rows(self, count: int) -> Any:
        """What a batch of so many rows looks like."""
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct((count, *spec.shape[1:]), spec.dtype), self.batch)

    def pipeline(self, plan: jpipe.Plan) -> jpipe.Pipeline:
        """With a plan."""
        return jpipe.Pipeline(self.stack, plan, self.loss, self.rule, precision=self.precision, **self.config.optimizer.of_pipeline)


def sizes_for(batch: int, devices: int, most: int) -> tuple[int, ...]:
    """Microbatch sizes to profile: divisors of the batch, each about twice the one before.

    The largest is about twice the share that each device has of the batch: with larger ones pipelines are mostly empty.
    """
    small = [rows for rows in range(1, math.isqrt(batch) + 1) if batch % rows == 0]
    divisors = sorted({*small, *(batch // rows for rows in small)})
    kept = [max(rows for rows in divisors if rows == 1 or rows * devices <= 2 * batch)]
    for rows in reversed(divisors):
        if rows <= kept[-1] / 1.5:
            kept.append(rows)
    return tuple(sorted(kept[:most]))


def profile_of(parts: Parts, topology: Topology | None, batch: int, devices: int, reporter: Reporter, largest_mesh: int = 1) -> Profile:
    """Measured on the device at hand, or analytic where the topology's device has FLOP/s to count with.

    Args:
        parts: the model.
        topology: None: the devices of this run.
        batch: rows between two updates.
        devices: how many there are.
        reporter: shows progress.
        largest_mesh: how many devices the largest mesh has that is to be tried: in an analytic profile microbatches are larger by that.
    """
    model_parts = parts.stack, parts.rows, parts.loss, parts.rule
    if topology is None or not topology.device.flops:
        sizes = sizes_for(batch, devices, MEASURED_SIZES)
        with reporter.counting("profiling the layers on this device") as progress:
            return measure(
                *model_parts,
                sizes,
                seconds=SECONDS,
                progress=progress,
                precision=parts.precision,
                ema_decay=parts.config.optimizer.ema_decay,
            )
    sizes = sizes_for(batch, max(devices // largest_mesh, 1), PAPER_SIZES)
    with reporter.counting(f"profiling the layers for {topology.device.name} analytically") as progress:
        return analyze(
            *model_parts, sizes, topology.device, progress=progress, precision=parts.precision, ema_decay=parts.config.optimizer.ema_decay
        )


def read_topology(file: str) -> Topology:
    """The topology of a YAML file.

    Raises:
        InputError: it cannot be read, or is none.
    """
    return Topology.from_yaml(read_text(file, "--topology", _MOST_TOPOLOGY), where=file)


def read_profile(file: str, rows: int) -> Profile:
    """A profile of jpipe's as JSON, or PipeDream's as `graph.txt` (named *.txt), whose microbatches have so many rows.

    Raises:
        InputError: it cannot be read, or is none.
    """
    text = read_text(file, "--profile", _MOST_PROFILE)
    return read_graph_txt(text, rows, where=file) if Path(file).suffix == ".txt" else Profile.from_json(text, where=file)


def read_text(file: str, option: str, most: int) -> str:
    """The text of a file, of at most so many bytes, that an option names."""
    other = f"{option}: expected text in UTF-8 in '{file}', found other bytes"
    return files.read_text(expanded(file, option), most, f"{option}: cannot read '{file}'", "name a file that is there", other)


_MOST_TOPOLOGY = 2**20
_FASTER = 0.01  # relative difference from which on a faster plan with delayed weights is worth a line
_NEEDS_NORM = "optimizer.clip_global_norm, skip_nonfinite or a dynamic loss scale"
_MOST_PROFILE = 2**25  # thousands of layers at a dozen sizes


def _possible(profile: Profile, request: Request, global_norm: bool, reporter: Reporter) -> tuple[tuple[str, ...], str]:
    """The schedules to try; if each of them can be used with one stage only, why.

    Says which schedules are left out because of options or shared parameters.
    """
    allowed = request.allowed
    used = " or ".join([_NEEDS_NORM] * global_norm + ["shared parameters"] * bool(profile.shared))
    refusals = {name: why for name in allowed if used and (why := sharing_refusal(name))}
    schedules = tuple(name for name in allowed if name not in refusals)
    if schedules:
        for name, why in refusals.items():
            reporter.say(f"left out, because of {used}: {name}: {why}")
        return schedules, ""
    return allowed, "; ".join(f"{name} with more than one stage cannot be used with {used}: {why}" for name, why in refusals.items())


def search(profile: Profile, topology: Topology, batch: int, request: Request, global_norm: bool, reporter: Reporter) -> Found:
    """Find and rank all plans that a run may have.

    Args:
        profile: the model's costs.
        topology: where it is to run.
        batch: rows between two updates.
        request: what else is asked for.
        global_norm: whether updates use the norm of the gradients of all stages, which not all schedules can.
        reporter: prints what was left out.

    Raises:
        InputError: no plan has such a batch, or none of the schedules asked for can use the norm or have shared parameters.
    """
    schedules, why_one_stage = _possible(profile, request, global_norm, reporter)
    if topology.num_devices >= MANY_DEVICES and "pipedream" in schedules:
        reporter.say(
            f"PipeDream's stages are searched exactly, which can take minutes for {topology.num_devices:,} devices; "
            "--schedules without pipedream leaves that out"
        )
    exact = not request.up_to
    planned, meshes = tuple(filter(is_planned, schedules)), _meshes(profile, topology, request, reporter)
    how = request.pipedream or "batch"
    replicas = request.replicas
    found = find_candidates(profile, topology, batch, exact=exact, schedules=planned, pipedream=how, meshes=meshes, replicas=replicas)
    best = min(found, key=lambda candidate: candidate.rank).degrees if found else meshes[0]
    options: dict[str, Any] = {"all_devices": request.all_devices, "global_norm": global_norm, "degrees": best}
    variants = find_variants(profile, topology, batch, exact=exact, schedules=schedules, planned=found, **options)
    found += list(variants.simulated)
    if not replicas:
        found = [candidate for candidate in found if max(candidate.replicas) == 1]
        reporter.say("left out: replicas, because layers carry their state from batch to batch")
    if why_one_stage:
        found = [c for c in found if c.depth == 1 and not (global_norm and _norm_refusal(c.plan(profile.ids)))]
        if not found:
            raise InputError(f"--schedules: {why_one_stage}")
        reporter.say(f"left out: {why_one_stage}")
    used = [candidate for candidate in found if candidate.devices == topology.num_devices or not request.all_devices]
    candidates = [candidate for candidate in used if candidate.microbatches <= MOST_MICROBATCHES]
    if not candidates:
        raise _none_found(profile, topology, batch, request, found, used)
    if len(candidates) < len(used):
        many = count(len(used) - len(candidates), "candidate")
        reporter.say(f"{many} left out, with more than {MOST_MICROBATCHES:,} microbatches")
    known = {candidate: Ranked(candidate, variants.simulated[candidate]) for candidate in candidates if candidate in variants.simulated}
    choice = choose(profile, topology, candidates, global_norm=global_norm, tried=known)
    delayed = None
    if not request.schedules and choice.ranked:
        delayed = _faster_with_delay(profile, topology, batch, request, global_norm, choice.ranked[0])
    return Found(choice, tuple(candidates), known, variants.left_out, delayed)


def _faster_with_delay(
    profile: Profile, topology: Topology, batch: int, request: Request, global_norm: bool, best: Ranked
) -> Candidate | None:
    """The fastest equal pipelines of the schedules that do not flush, by closed form; None if they are not faster than `best`."""
    used, degrees = global_norm or bool(profile.shared), best.candidate.degrees
    names = [name for name in planned_schedules() if not jpipe.schedules.SCHEDULES[name].flushes and not (used and sharing_refusal(name))]
    found = search_parallel(
        *Meshes(profile, topology).of(degrees), batch, exact=not request.up_to, schedules=names, replicas=request.replicas
    )
    used_devices = [c for c in found if c.workers * degrees.size == topology.num_devices or not request.all_devices]
    fitting = [c for c in used_devices if c.over is None and c.depth > 1 and c.microbatches <= MOST_MICROBATCHES]
    fastest = max(fitting, key=lambda candidate: candidate.samples_per_second, default=None)
    if fastest is None or fastest.samples_per_second <= (1 + _FASTER) * best.samples_per_second:
        return None
    return on_meshes(fastest, degrees) if degrees.size > 1 else fastest


def _none_found(
    profile: Profile, topology: Topology, batch: int, request: Request, found: list[Candidate], used: list[Candidate]
) -> InputError:
    """What is said where no plan is left: of those that were found, of those that use as many devices as they must."""
    asked = f" with {' or '.join(request.schedules)}" if request.schedules else ""
    devices, others = count(topology.num_devices, "device"), "schedules, " if asked else ""
    if found and not used:
        most = max(candidate.devices for candidate in found)
        why, change = "", f" devices, or allow other {others}batches"
        if not request.replicas:
            layers = count(len(profile.layers), "layer")
            why = f": layers carry their state from batch to batch, so stages have no replicas, and {layers} make at most as many stages"
            change = " devices, or a model of more layers"
        return InputError(f"plan: no plan{asked} has a batch of {batch} rows on all of {devices}, only on {most}{why}; use {most}{change}")
    limit = f"at most {MOST_MICROBATCHES:,} " if used else ""
    sizes = ", ".join(map(str, profile.sizes))
    return InputError(
        f"plan: no plan{asked} has a batch of {batch} rows in {limit}microbatches of {sizes} rows on {devices}; "
        f"allow other {others}batches or numbers of devices"
    )


def _meshes(profile: Profile, topology: Topology, request: Request, reporter: Reporter) -> tuple[Degrees, ...]:
    """The meshes to try. Says what those cost that are asked for and larger than a server.

    Raises:
        InputError: one that is asked for does not fit the devices or the layers.
    """
    if request.degrees is None:
        return possible_degrees(profile, topology)
    for degrees in request.degrees:
        if reason := mesh_refusal(profile, degrees):
            raise InputError(f"--mesh: {reason}")
        topology.groups(degrees.size)  # refuses what does not fill the machine
        if degrees.size > topology.most_in_mesh:
            rows = max(rows for rows in profile.sizes if rows % degrees.data == 0)
            inside, link = topology.mesh_link(topology.most_in_mesh), topology.mesh_link(degrees.model)
            taken, near = (
                mesh_seconds(profile, rows, degrees, links) for links in ((link, topology.mesh_link(degrees.size)), (inside, inside))
            )
            slower = f", {taken / near:.1f} times as long as over links like those inside one" if near else ""
            level = f"the {count(topology.most_in_mesh, 'device')} of {topology.levels[0].name or 'the innermost level'}"
            reporter.say(
                f"--mesh: a mesh ({degrees}) is larger than {level}: sums and gathers inside it take {1e3 * taken:,.1f} ms for a "
                f"microbatch of {table.rows_of(rows)}{slower}"
            )
    return request.degrees


def _norm_refusal(plan: jpipe.Plan) -> str:
    return jpipe.schedules.SCHEDULES[plan.schedule].norm_refusal(plan)


def nothing_fits(choice: Choice) -> InputError:
    """What is said where no plan fits."""
    return InputError(*(f"plan: {line}" for line in table.what_would_fit(choice)))


def confirm(found: Found, parts: Parts, report: Callable[[Attempt], None]) -> tuple[Found, Compiled]:
    """Compile the fastest plans until one fits, and those that may be as fast; put the best first, with what XLA says of it.

    Args:
        found: what was found by estimates.
        parts: the model.
        report: gets each plan that does not fit.

    Raises:
        InputError: there is none; says what was tried.
    """
    device, programs = jax.devices()[0], dict[Any, Any]()

    def compile(choice: Choice, ranked: Ranked) -> Compiled:
        pipe = parts.pipeline(choice.plan(ranked))
        return compile_stages(choice, ranked, pipe, parts.rows(ranked.candidate.batch), device, programs)

    result = jpipe_planner.confirm(found.choice, found.candidates, found.known, compile, report)
    if not result.attempts and not result.fitting:
        raise nothing_fits(found.choice)
    if not result.fitting:
        raise _nothing_fitted(result.attempts, scratch_words(parts, found.choice.topology))
    ranked = (*(one.ranked for one in result.fitting), *result.others)
    kinds = {one.candidate.kind for one in ranked}
    rejected = tuple(candidate for candidate in found.choice.rejected if candidate.kind not in kinds)
    considered = found.choice.considered + len(result.added)
    choice = dataclasses.replace(found.choice, ranked=ranked, rejected=rejected, considered=considered)
    after = dataclasses.replace(
        found,
        choice=choice,
        candidates=(*found.candidates, *result.added),
        known=result.known,
        compiled=len(result.fitting),
        attempts=tuple(result.attempts),
    )
    return after, result.fitting[0]


def _nothing_fitted(attempts: Sequence[Attempt], scratch: str) -> InputError:
    """What is said where the compiled stages of no plan fit: what was tried, and what to change."""
    tried = [f"plan: {table.attempt(one)}" for one in attempts]
    change = "use more devices, a smaller batch or devices with more memory"
    return InputError(
        f"plan: no plan fits: the compiled stages of {count(len(attempts), 'plan')} need too much memory; {change}",
        *tried,
        *([f"plan: {scratch}"] if scratch else []),
    )


def scratch_words(parts: Parts, topology: Topology) -> str:
    """What the scratch memory of stages compiled for this machine says about other machines; "" if that is the same."""
    config = parts.config
    computes = config.precision.computes or config.model.compute_dtype
    if "16" not in computes or not topology.device.flops or jax.devices()[0].platform != "cpu":
        return ""
    return (
        f"temporaries are those of a CPU, whose compiler asks in {computes} for two to four times the scratch memory of a GPU's: "
        "on GPUs a plan that lacks less than its temporaries may fit, or need less recomputation"
    )


def prepare(request: Request) -> int | None:
    """Have JAX make as many CPU devices as a plan for this machine is to use; how many devices that are, None: a file says.

    For other machines it makes as many as the largest mesh has, whose stages are compiled for them.
    """
    if request.topology != LOCAL:
        degrees = request.degrees
        force_cpu_devices(read_topology(request.topology).most_in_mesh if degrees is None else max(one.size for one in degrees))
        return None
    force_cpu_devices(request.devices or usable_cores())
    start_devices()
    found = jax.device_count()
    if request.devices is not None and request.devices > found:
        raise InputError(f"--devices: expected at most the {found} devices there are, found {request.devices}; name a file as --topology")
    return request.devices or found


def _spec(rows: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(rows.shape), jax.dtypes.canonicalize_dtype(np.dtype(rows.dtype)))
