"""The options of `jpipe plan`, made from the command line."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from jpipe_train.console.options import Flag, OptionalCount, OptionalFile, Overrides

LOCAL = "local"
Names = Annotated[
    tuple[str, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME,NAME",
        instance_from_str=lambda words: tuple(filter(None, words[0].split(","))),
        is_instance=lambda names: isinstance(names, tuple),
        str_from_instance=lambda names: [",".join(names)],
    ),
]


@dataclass(frozen=True)
class Options:
    """The options of `jpipe plan`.

    Attributes:
        config: The YAML file of a run, such as configs/gpt-bytes.yaml. Only agree, links, slices and max_delay of its plan count.
        overrides: Replace one key of the config, such as model.depth=8.
        topology: The machines: a YAML file, such as configs/topologies/cluster-a.yaml, or local for the devices of this run.
        profile: A file from --profile-out with the costs of the layers, or a graph.txt of PipeDream; by default layers are profiled here.
        batch: Rows between two updates; by default the config's batch size.
        up_to: Allow batches with fewer rows than --batch, if they train faster.
        rows: The number of rows of a microbatch in a graph.txt; by default 1.
        schedules: The schedules to try, such as pipedream_2bw,gpipe, or all; by default those that flush.
        max_delay: Allow weights that are at most this many updates old, in the mean over stages, under any schedule.
        devices: With local, the number of devices to use; by default all, and on CPUs one per core.
        meshes: Use only stages on this mesh, such as model=4, data=2,model=4,fsdp or expert=8, or none for one device each.
            By default meshes inside a server are tried for a topology from a file.
        pipedream: When PipeDream's stages update: by default once per batch; with replicas, after each replica has finished a microbatch.
        measure: With a config and local, run the best plans of this many kinds for some seconds each, and choose the fastest.
        agree: Make replicas parallel pipelines that agree on their weights every this many updates; by default as plan.agree says.
        offload: Try plans with parts of the state in host memory even if others fit.
        out: Write the plan into this file, as JSON for plan.file.
        profile_out: Write the profile into this file.
        png: Draw throughput against memory of all candidates, and the balance of the stages, into this file.
        explain: Explain the choice, and list by how much other plans exceed the memory.
        allow_code: Import and run the functions that a config names, as in train.
    """

    config: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG]")] = None
    overrides: Overrides = ()
    topology: Annotated[str, tyro.conf.arg(metavar="FILE|local")] = LOCAL
    profile: OptionalFile = None
    batch: Annotated[int | None, tyro.conf.arg(metavar="ROWS")] = None
    up_to: Flag = False
    rows: Annotated[int | None, tyro.conf.arg(metavar="ROWS")] = None
    schedules: Names = ()
    max_delay: Annotated[float | None, tyro.conf.arg(metavar="UPDATES")] = None
    devices: OptionalCount = None
    meshes: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="mesh", metavar="MESH|none")] = ()
    pipedream: Literal["batch", "replicas"] | None = None
    measure: Annotated[int | None, tyro.conf.arg(metavar="PLANS")] = None
    agree: Annotated[int | None, tyro.conf.arg(metavar="UPDATES")] = None
    offload: Flag = False
    out: OptionalFile = None
    profile_out: OptionalFile = None
    png: OptionalFile = None
    explain: Flag = False
    allow_code: Flag = False
