"""Moves to host memory and back, as they are lowered, verified and priced."""

import json
from dataclasses import replace

import pytest

from jpipe import InputError, Link, Plan, lower, simulate, to_perfetto
from jpipe.capabilities.host_memory.program import Fetch, Offload
from jpipe.programs import ProgramError, StageCost
from jpipe.programs._instructions import Compute, Update
from tests.grid import parse_grid

EVERYTHING = dict.fromkeys(("optimizer", "versions", "residuals", "stash"), "all")
COST = StageCost(weights=3, frozen=1, optimizer=4, accumulators=2, residuals=1)


def moves_of(worker, program) -> list[str]:
    """Return what a worker does: > to host memory, < back, o the optimizer state, v a version, r residuals, s a stash, U an update."""
    words = []
    for i in program.worker(worker):
        if isinstance(i, Offload | Fetch):
            words.append("<>"[isinstance(i, Offload)] + i.what[0] + (str(i.number) if i.what != "optimizer" else ""))
        elif isinstance(i, Compute):
            words.append(f"{i.op}{i.microbatch}.{i.version}")
        elif isinstance(i, Update):
            words.append(f"U{i.batch}")
    return words


def test_the_moves_of_a_stage_of_pipedream():
    program = lower(Plan.even("abc", 3, "pipedream", 1, offload={"optimizer": "all", "versions": "all"}), 5)
    assert " ".join(moves_of(0, program)) == (
        "F0.0 F1.0 F2.0 <o B0.0 U0 >o F3.1 <o B1.0 U1 >o >v1 F4.2 <o B2.0 U2 >o <v1 <o B3.1 U3 >o >v3 <o B4.2 U4 >o <v3"
    )


@pytest.mark.parametrize("fields", [{"schedule": "pipedream"}, {"schedule": "pipedream_2bw", "replicas": 1}, {"schedule": "zb_h1"}])
def test_a_program_without_one_of_its_moves_is_refused(fields):
    program = lower(Plan.even("abc", 3, microbatches=3, offload=EVERYTHING, **fields), 4)
    simulate(program)
    moves = [n for n, i in enumerate(program.instructions) if isinstance(i, Fetch) or (isinstance(i, Offload) and i.what == "optimizer")]
    assert moves
    for n in moves:
        damaged = replace(program, instructions=program.instructions[:n] + program.instructions[n + 1 :])
        with pytest.raises(ProgramError, match="host memory"):
            simulate(damaged)


def test_the_moves_of_the_stages_of_zero_bubbles():
    program = lower(Plan.even("abc", 3, "zb_h1", 4, offload={"residuals": "all", "stash": "all"}), 1)
    assert [" ".join(moves_of(w, program)) for w in range(3)] == [
        "F0.0 F1.0 >r1 F2.0 >r2 B0.0 <r1 F3.0 <r2 B1.0 B2.0 B3.0 U0",
        "F0.0 F1.0 I0.0 F2.0 >r2 I1.0 >s1 W0.0 <r2 F3.0 <s1 I2.0 W1.0 I3.0 W2.0 W3.0 U0",
        "FI0.0 FI1.0 >s1 FI2.0 >s2 W0.0 <s1 FI3.0 <s2 W1.0 W2.0 W3.0 U0",
    ]


def test_other_moves_are_refused():
    program = lower(Plan.even("ab", 2, "gpipe", 2, offload={"optimizer": [1]}), 1)
    for move, message in (
        (Offload(0, "optimizer", 0), "keeps the optimizer of stage 0 on the device"),
        (Offload(1, "optimizer", 0), "in host memory already"),
        (Fetch(1, "versions", 0), "keeps the versions of stage 1 on the device"),
    ):
        with pytest.raises(ProgramError, match=message):
            simulate(replace(program, instructions=(move, *program.instructions)))


def test_moves_take_time_and_memory_of_the_host():
    plan = Plan.even("ab", 2, "gpipe", 2, offload={"optimizer": [0]})
    run = simulate(lower(plan, 2), [COST] * 2, host=Link(bandwidth=2.0, latency=0.5))
    # A batch takes 9 ticks. The optimizer state comes back in 2.5 ticks, beside the last backward of 2, and leaves beside the next batch.
    assert run.seconds == 2 * 9 + 2 * 0.5
    assert run.held_bytes == (3 + 4 + 2 + 1, 3 + 4 + 2 + 2)
    assert run.host_bytes == (4, 0)
    assert run.host_moved_bytes == (4 * 4, 0)
    assert {sample.optimizer for sample in run.memory[0]} == {0, 4}
    moves = [(transfer.row, transfer.label, transfer.end - transfer.start, transfer.size) for transfer in run.transfers if transfer.is_move]
    assert moves == [("host to 0", "o", 2.0, 4), ("0 to host", "o", 2.0, 4)] * 2
    assert parse_grid(run.grid(transfers=True)) == parse_grid(run.grid())
    rows = [line.split("|")[0].strip() for line in run.grid(transfers=True).splitlines()]
    assert rows == ["tick", "rank 0", "rank 1", "host to 0", "0 to host"]
    events = json.loads(to_perfetto({"": run.timeline}, {"": run.transfers}))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == rows[1:]
    assert [event["args"]["bytes"] for event in events if event["name"] == "o"] == [4] * 4
    blocking = simulate(lower(plan, 2), [COST] * 2, host=lambda rank: Link(bandwidth=2.0), overlap="none")
    assert blocking.seconds == 2 * (9 + 2 + 2)


def test_fewer_versions_are_on_the_device():
    plans = [Plan.even("abcd", 4, "pipedream", 1, offload=offload) for offload in (None, {"versions": "all"})]
    before, after = (simulate(lower(plan, 12), [COST] * 4) for plan in plans)
    assert before.seconds == after.seconds
    # Of 4 versions of 2 bytes 2 are there as long as forwards come, and 3 with residuals of one microbatch less while the pipeline drains.
    assert [most - later for most, later in zip(before.held_bytes, after.held_bytes, strict=True)] == [3, 1, 0, 0]
    assert after.host_bytes == (3 * 2, 2 * 2, 0, 0)  # one version leaves just before another one comes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload": {"optimizer": [2]}}, "plan: offload.optimizer: expected stages from 0 to 1, or 'all', found 2"),
        (
            {"offload": {"residuals": "all"}, "ranks": [[0, 1]]},
            "plan: offload.residuals: expected no chunks_per_rank, found 2: two stages of a rank",
        ),
        ({"offload": {"residuals": [1]}, "replicas": 2, "sum_parts": 2}, "plan: offload.residuals: expected no stages.1.sum_parts, found"),
        ({"offload": {"versions": "all"}, "replicas": 2, "shard_optimizer": True}, "plan: offload.versions: expected no shard_optimizer"),
    ],
)
def test_plans_that_cannot_move(fields, message):
    with pytest.raises(InputError, match=message):
        Plan.even("abcd", 2, "gpipe", 2, **fields)
