"""Every option that a search adds, on every kind of machine: equal devices, servers, and devices that differ."""

import io

import pytest
from rich.console import Console

import jpipe
from jpipe.plan import Agreement, Links
from jpipe_planner import Profile, Topology
from jpipe_planner.ranking import table
from jpipe_planner.search.candidate import Extras
from jpipe_train.console.progress import Reporter
from jpipe_train.plan.inputs import Request
from jpipe_train.plan.search import search

MB = 10**6
MEMORY = 72 * MB  # for which some plans recompute, share an optimizer, or use host memory
SERVERS = [{"count": 2, "bandwidth": 1e9}, {"count": 2, "bandwidth": 1e8, "latency": 1e-4}]
SLOW = {"devices": "2-3", "speed": 0.6}
MACHINES = {
    "equal devices": {"levels": [{"count": 4, "bandwidth": 1e8}]},
    "servers": {"levels": SERVERS},
    "a slower server": {"levels": SERVERS, "differing": [SLOW]},
    "less memory": {"levels": SERVERS, "differing": [{"devices": "0-1", "memory": 60 * MB}]},
    "all that may differ": {
        "levels": SERVERS,
        "differing": [SLOW | {"memory": 60 * MB, "bandwidth": {"1": 5e7}, "host": {"bandwidth": 1e9}}],
    },
}
REQUESTS = (
    {},
    {"meshes": ("model=2",)},
    {"extras": Extras(agree=Agreement(every=4))},
    {"extras": Extras(links=Links(activations="int8"))},
)


def profile() -> Profile:
    """Return three equal layers whose sums and messages take about as long as their computations."""
    at = {"forward": 0.01, "backward": 0.02, "backward_weight": 0.01, "outputs": MB, "residuals": {"none": 8 * MB, "full": MB}}
    layer = {"weights": 4 * MB, "optimizer": 8 * MB, "at": [at], "tensor": {"weights": 1.0, "compute": 1.0, "divides": 2}}
    return Profile(source="analytic", sizes=[1], inputs=[MB], labels=[8], layers=[{"id": f"layer_{n}", **layer} for n in range(3)])


def options(plan: jpipe.Plan) -> set[str]:
    """Return what a plan does that the plainest one does not."""
    stages = plan.stages
    found = {name for name in ("agree", "links", "offload", "max_in_flight", "shard_optimizer", "extra_in_flight") if getattr(plan, name)}
    found |= {"sum_parts"} if any(stage.sum_parts for stage in stages) else set()
    found |= {"mesh"} if stages[0].devices_each > 1 else set()
    found |= {"recompute"} if any(stage.recompute != "none" for stage in stages) else set()
    return found | ({"early"} if plan.split_backward == "early" else set())


def limits(plan: jpipe.Plan, topology: Topology) -> list[float]:
    """Return the bytes of the first device of each rank, in the order of the ranks."""
    first = {rank: n * plan.stages[0].devices_each for n, rank in enumerate(plan.placing_order)}
    if plan.placement is not None:
        first = {rank: plan.placement[p][replica] for rank, (p, replica) in enumerate(plan.rank_positions)}
    return [topology.devices[first[rank]].limit for rank in range(len(first))]


def planned(machine: str, extras: dict, *schedules: str, memory: float = MEMORY) -> set[str]:
    """Search plans, check each of them, and return what they do."""
    topology, seen = Topology(**MACHINES[machine], device={"memory": memory, "host": {"bandwidth": 2e9}}), set[str]()
    request = Request(topology="a file", schedules=schedules, offload=True, all_devices=True, **extras)
    result = search(profile(), topology, 4, request, False, Reporter(1, 1, "samples", Console(file=io.StringIO())))
    choice = result.choice
    assert choice.ranked
    for one in result.tried.values():
        plan = choice.plan(one)
        assert jpipe.Plan.from_json(plan.to_json()) == plan
        fits = all(size <= limit for size, limit in zip(one.simulated.peak_bytes, limits(plan, topology), strict=True))
        assert (one.candidate.over is None) == fits
        seen |= options(plan)
    assert len(table.rows(choice, len(choice.ranked))) == len(choice.ranked)
    assert table.why_chosen(choice, 3)
    table.why_rejected(choice, 20)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_every_option_is_planned_on_every_machine(machine):
    seen = set[str]().union(*(planned(machine, extras, "pipedream_flush", "pipedream") for extras in REQUESTS))
    seen |= planned(machine, {}, "pipedream_flush", memory=0.7 * MEMORY)
    assert seen == {
        *("sum_parts", "mesh", "recompute", "agree", "links", "offload", "max_in_flight", "shard_optimizer", "extra_in_flight", "early")
    }


def test_stages_on_devices_that_differ_sum_in_parts():
    assert {"sum_parts", "offload"} <= planned("a slower server", {}, "pipedream_flush")
