"""The request of `jpipe plan`, and the topology and profile files that it names."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import pydantic

import jpipe
from jpipe import InputError, files
from jpipe.files import expanded
from jpipe.plan import Agreement, Exclusion, excluded
from jpipe.schedules import SCHEDULES, name_of
from jpipe_planner import Profile, Topology, read_graph_txt
from jpipe_planner.machine.local import usable_cores
from jpipe_planner.profile.sharded import NO_MESH, Degrees
from jpipe_planner.search.candidate import NO_EXTRAS, Extras
from jpipe_train.assemble.build import force_cpu_devices, start_devices
from jpipe_train.config.plan_config import PlanConfig
from jpipe_train.plan.request import LOCAL, Options

ALL = "all"  # a word in place of names of schedules
MOST_TOPOLOGY = 2**20  # the largest size of the file of a topology or target in bytes
_MOST_PROFILE = 2**25  # the largest size of a profile file in bytes: thousands of layers at a dozen sizes

_EXCLUSIONS = (
    Exclusion("--pipedream", "--agree", "all stages of pipelines that agree have equally many replicas", "leave one of them out"),
    Exclusion("--pipedream", "plan.agree", "all stages of pipelines that agree have equally many replicas", "leave one of them out"),
    Exclusion("--mesh", "plan.links", "a search cannot price compressed messages on meshes"),
    Exclusion("--pipedream", "plan.slices", "PipeDream's stages are searched for whole rows", "leave one of them out"),
    Exclusion("plan.links.sums", "search for a plan", "a search cannot price compressed sums", "remove it, or write the plan by hand"),
    Exclusion(
        "plan.links.bottleneck",
        "search for a plan",
        "the places of bottlenecks belong to the model, and a search cuts it elsewhere",
        "name the layers before them in plan.links.bottleneck.after",
    ),
)
"""The options that a search cannot combine."""


@dataclass(frozen=True)
class Request(Options):
    """The request for a plan: the options of the command, and options that follow from the config and the profile."""

    all_devices: bool = False  # whether plans must use all devices, because each device belongs to a separate process
    replicas: bool = True  # whether stages may have replicas; false if layers carry state for each row from batch to batch
    share_optimizer: bool = True  # whether replicas may share an optimizer; false with a moving average of the weights
    extras: Extras = NO_EXTRAS  # the agreements, compressed messages and slices that `agree` and the config request

    def with_extras(self, plan: PlanConfig | None) -> "Request":
        """Return the request with the agreements, messages and slices of `agree` and the config. Raise InputError if they contradict."""
        agree, links, slices = (None, None, None) if plan is None else (plan.agree, plan.links, plan.slices)
        sums, bottleneck = (None, None) if links is None else (links.sums, links.bottleneck)
        without_places = bottleneck is not None and bottleneck.after is None
        meshes = None if self.degrees in (None, (NO_MESH,)) else self.meshes
        given = {
            "--agree": self.agree,
            "--mesh": meshes,
            "--pipedream": self.pipedream,
            "search for a plan": True,
            "plan.links.bottleneck": bottleneck if without_places else None,
        }
        of_plan = {"plan.agree": agree, "plan.links": links, "plan.links.sums": sums, "plan.slices": slices}
        if problem := excluded(None, _EXCLUSIONS, **given, **of_plan):
            raise InputError(problem)
        if self.agree is not None:  # the agreement has the options of the config, or default options
            fields = {} if agree is None else agree.model_dump()
            try:
                agree = Agreement.model_validate(fields | {"every": self.agree})
            except pydantic.ValidationError as error:
                raise jpipe.errors.explain(error, Agreement, "--agree") from None
        return replace(self, extras=Extras(agree, links, slices))

    @property
    def allowed(self) -> tuple[str, ...]:
        """The names of the schedules to try. Raise InputError if a requested name belongs to no schedule."""
        if self.schedules:
            try:
                return tuple(SCHEDULES) if ALL in self.schedules else tuple(map(name_of, self.schedules))
            except InputError as error:
                raise error.at("--schedules") from None
        if self.max_delay:
            return tuple(SCHEDULES)
        requested = {"pipedream"} if self.pipedream is not None else set()
        return tuple(name for name, rules in SCHEDULES.items() if rules.flushes or name in requested)

    @property
    def degrees(self) -> tuple[Degrees, ...] | None:
        """The requested meshes, or None for all that the topology and the profile allow. Raise InputError if a text describes no mesh."""
        meshes = self.meshes if self.meshes or self.topology != LOCAL else ("none",)
        return tuple(dict.fromkeys(map(Degrees.read, meshes))) or None

    def most_in_mesh(self, topology: Topology) -> int:
        """Return the number of devices in the largest mesh to try on the machines of a topology."""
        return topology.most_in_mesh if self.degrees is None else max(mesh.size for mesh in self.degrees)


def read_topology(file: str, option: str = "--topology") -> Topology:
    """Read the topology in a YAML file. Raise InputError if it cannot be read, or is not a topology."""
    return Topology.from_yaml(read_text(file, option, MOST_TOPOLOGY), file, expanded(file, option).parent)


def read_profile(file: str, rows: int) -> Profile:
    """Read a JSON profile of jpipe, or a `graph.txt` of PipeDream (any name *.txt) with microbatches of `rows` rows (else InputError)."""
    text = read_text(file, "--profile", _MOST_PROFILE)
    return read_graph_txt(text, rows, where=file) if Path(file).suffix == ".txt" else Profile.from_json(text, where=file)


def read_text(file: str, option: str, most: int) -> str:
    """Read the file `file`, which the option `option` names. It may have at most `most` bytes."""
    other = f"{option}: expected text in UTF-8 in '{file}', found other bytes"
    return files.read_text(expanded(file, option), most, f"{option}: cannot read '{file}'", "name a file that is there", other)


def prepare_devices(request: Request, num_processes: int = 1) -> int | None:
    """Configure the CPU devices that JAX needs for a plan.

    A plan for this machine needs all its devices. A plan for other machines needs as many as the largest mesh has. If there are several
    processes, each has one device, or as many as the largest mesh has, and the devices of all processes start together. Return the number
    of devices of this machine to use; None if the topology is a file, or if several processes use all their devices.
    """
    if request.topology != LOCAL:
        force_cpu_devices(request.most_in_mesh(read_topology(request.topology)))
        return None
    if num_processes > 1:
        if request.devices is not None:
            raise InputError("--devices: several processes use all their devices; leave it out, or start fewer processes")
        force_cpu_devices(max(mesh.size for mesh in request.degrees or (NO_MESH,)))
        return None
    force_cpu_devices(request.devices or usable_cores())
    start_devices()
    available = jax.device_count()
    if request.devices is not None and request.devices > available:
        raise InputError(
            f"--devices: this machine has {available}, found {request.devices}; give at most that, or name a file as --topology"
        )
    return request.devices or available
