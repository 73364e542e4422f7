"""The options of `jpipe plan`, which the command line is read from."""

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
        config: The YAML file of a run, such as configs/gpt-bytes.yaml; of its plan only agree, links and max_delay count.
        overrides: Replace one key of the config, such as model.depth=8.
        topology: The machines: a YAML file, such as configs/topologies/cluster-a.yaml, or local: the devices at hand.
        profile: The costs of the layers, from --profile-out, or a graph.txt of the original PipeDream; by default profiled here.
        batch: Rows between two updates; by default the config's batch size.
        up_to: Allow fewer rows than that, if they train faster.
        rows: Rows of a microbatch of a graph.txt; by default 1.
        schedules: Only these, such as pipedream_2bw,gpipe, or all; by default those that flush, which train as without a pipeline.
        max_delay: Only plans with weights at most this many updates old, in the mean over stages; tries all without --schedules.
        devices: With local, how many to use; by default all, and on CPUs as many as there are cores.
        meshes: Only stages on meshes like this, such as model=4, data=2,model=4,fsdp or expert=8, or none: on one device each. May be given
            several times. By default meshes inside a server are tried for a topology from a file, if the model's logical axes allow them.
        pipedream: How PipeDream's stages update: by default once a batch; or (replicas) after a microbatch of each replica.
        measure: With a config and local, run the best plan of each of this many kinds for some seconds, and choose the fastest.
        agree: Let replicas be parallel pipelines that agree on their weights after this many updates each; by default as plan.agree says.
        offload: Try parts of the state in host memory, though plans fit without; if none does, that is tried anyway.
        out: Write the plan into this file, a JSON for plan.file.
        profile_out: Write the profile into this file.
        png: Draw throughput against memory of all candidates, and the balance of the stages, into this file.
        explain: Explain the choice, and list the plans that do not fit and by how much.
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
