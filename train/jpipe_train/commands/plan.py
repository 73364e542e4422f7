"""`jpipe plan CONFIG`: find the fastest plan that fits."""

from functools import partial
from typing import Annotated, Literal

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Flag, OptionalCount, OptionalFile, Overrides, Process


def plan(
    config: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG]")] = None,
    overrides: Overrides = (),
    topology: Annotated[str, tyro.conf.arg(metavar="FILE|local")] = "local",
    profile: OptionalFile = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="ROWS")] = None,
    up_to: Flag = False,
    rows: Annotated[int | None, tyro.conf.arg(metavar="ROWS")] = None,
    schedules: Annotated[str, tyro.conf.arg(metavar="NAME,NAME")] = "",
    max_delay: Annotated[float | None, tyro.conf.arg(metavar="UPDATES")] = None,
    devices: OptionalCount = None,
    mesh: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="MESH|none")] = (),
    pipedream: Literal["batch", "replicas"] | None = None,
    measure: Annotated[int | None, tyro.conf.arg(metavar="PLANS")] = None,
    agree: Annotated[int | None, tyro.conf.arg(metavar="UPDATES")] = None,
    offload: Flag = False,
    out: OptionalFile = None,
    profile_out: OptionalFile = None,
    png: OptionalFile = None,
    explain: Flag = False,
    allow_code: Flag = False,
    process: Fields[Process] = ALONE,
) -> int:
    """Find the plan that trains a model fastest on these machines and fits into their memory. No run is started.

    Args:
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
        mesh: Only stages on meshes like this, such as model=4, data=2,model=4,fsdp or expert=8, or none: on one device each. May be given
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
        process: Several processes, with local.
    """
    with interrupt.importing():
        from jpipe_train.plan.inputs import LOCAL, Request
        from jpipe_train.plan.plan import main
        from jpipe_train.run import job
    request = Request(
        topology=topology,
        batch=batch,
        up_to=up_to,
        schedules=tuple(filter(None, schedules.split(","))),
        devices=devices,
        pipedream=pipedream,
        meshes=mesh,
        max_delay=max_delay,
        measure=measure,
        offload=offload,
        agree=agree,
        config=config,
        overrides=overrides,
        allow_code=allow_code,
        profile=profile,
        rows=rows,
        out=out,
        profile_out=profile_out,
        png=png,
        explain=explain,
    )
    limits = process.connect_limit, process.wait_limit
    return job.plan(partial(main, request, *limits), process, alone=topology != LOCAL)
