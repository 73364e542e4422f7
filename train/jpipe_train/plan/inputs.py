"""The request that `jpipe plan` answers, and the topology and profile files that it names."""

from dataclasses import dataclass
from pathlib import Path

import jax
from jpipe_planner import Degrees, Profile, Topology, Updates, read_graph_txt, usable_cores

import jpipe
from jpipe import InputError, files
from jpipe.files import expanded
from jpipe_train.assemble.build import force_cpu_devices, start_devices

LOCAL = "local"
ALL = "all"  # schedules
_MOST_TOPOLOGY = 2**20  # bytes
_MOST_PROFILE = 2**25  # bytes: thousands of layers at a dozen sizes


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
