"""The tables of "Which schedule to use" equal simulations of the model that the page describes."""

import dataclasses

import pytest

import jpipe
from benchmarks.papers.document import read
from tests.packages import ROOT

PAGE = ROOT / "docs" / "explanation" / "which-schedule.md"
TIMES = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
SIZES = {"weights": 20, "optimizer": 40, "accumulators": 20, "residuals": 10, "stash": 4}  # in tenths of a GB
COST = jpipe.programs.StageCost(**SIZES, **TIMES)


def rows_of(head: str) -> list[list[str]]:
    """Return the cells of the table with this first column."""
    (table,) = (table for table in read(PAGE.read_text("utf-8")) if table.head[0] == head)
    return [[str(cell).strip("`") for cell in row] for row in table.rows]


def simulated(schedule, m, cost=COST, link=None, **options):
    """Return the ticks of a batch in the steady state, and the most GB of the first rank."""
    plan = jpipe.Plan.even("abcdefgh", 4 * options.get("chunks_per_rank", 1), schedule, m, **options)
    run = jpipe.simulate(jpipe.lower(plan, 22), [cost] * plan.depth, jpipe.Link() if link is None else link)
    return jpipe.programs.extract_window(run.timeline, run.memory, m, first=10, batches=10).step_seconds, run.held_bytes[0] / 10


@pytest.mark.parametrize("row", rows_of("m"), ids=lambda row: f"m = {row[0]}")
def test_the_price_of_a_flush_and_the_delay(row):
    m, price, delay, versions, buffered = row
    stashing = jpipe.Plan.even("abcd", 4, "pipedream", int(m))
    flush, without = simulated("pipedream_flush", int(m)), simulated("pipedream", int(m))
    assert price == f"{flush[0] / without[0]:.2f}"
    assert delay == f"{stashing.mean_delay:.3f}"
    assert int(versions) == jpipe.schedules.SCHEDULES["pipedream"].versions_alive(stashing, 0)
    if int(m) >= 4:
        assert float(buffered) == jpipe.Plan.even("abcd", 4, "pipedream_2bw", int(m)).mean_delay
    else:
        assert buffered == "needs m ≥ 4"


@pytest.mark.parametrize("row", rows_of("latency"), ids=lambda row: f"latency {row[0]} {row[1]}")
def test_a_latency_and_what_hides_it(row):
    latency, option, *found = row
    options = {"extra_in_flight: 1": {"extra_in_flight": 1}, "split_backward: early": {"split_backward": "early"}, "": {}}[option]
    for cell, schedule in zip(found, ("pipedream_flush", "pipedream_2bw"), strict=True):
        seconds, gigabytes = simulated(schedule, 8, link=jpipe.Link(latency=float(latency)), **options)
        assert cell == f"{seconds / 8:.2f}, {gigabytes:.0f} GB"


@pytest.mark.parametrize("row", rows_of("message"), ids=lambda row: f"{row[0]} ticks")
def test_messages_that_take_long(row):
    message, *found = row
    link, cost = jpipe.Link(bandwidth=1 / float(message)), dataclasses.replace(COST, outputs=1, gradient=1)
    half = dataclasses.replace(cost, **{name: time / 2 for name, time in TIMES.items()})
    expected = [
        simulated("pipedream_flush", 8, cost, link),
        simulated("pipedream_flush", 8, cost, link, extra_in_flight=1),
        simulated("interleaved_1f1b", 8, half, link, chunks_per_rank=2),
        simulated("pipedream_2bw", 8, cost, link),
        simulated("pipedream_2bw", 8, cost, link, extra_in_flight=1),
    ]
    assert found == [f"{seconds / 8:.2f}" for seconds, _ in expected]
