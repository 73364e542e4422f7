"""The search equals the paper's recurrence."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jpipe
from benchmarks.papers.partition import Problem
from benchmarks.papers.recurrence import search_paper
from jpipe_planner.machine.topology import Topology

NUMBERS = st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 1, 5, 30]), st.sampled_from([0, 2, 20]))


def recurrence(layers, levels, price):
    """Compute A^L(0 -> N, m_L) of the paper by its definition."""

    @cache
    def t(k, i, j, m):
        weights = sum(layer[3] for layer in layers[i:j])
        inner = a(k - 1, i, j, levels[k - 1][0] if k else 1)
        if price == "text":
            return max(inner, 2 * (m - 1) * weights / levels[k][1]) / m
        return (inner + 4 * (m - 1) / m * weights / levels[k][1]) / m

    @cache
    def a(k, i, j, m):
        if k < 0:
            return float(sum(layer[0] + layer[1] for layer in layers[i:j]))
        if m == 1:
            return a(k - 1, i, j, levels[k - 1][0] if k else 1)
        cuts = [2 * layer[2] / levels[k][1] if price == "text" else 0.0 for layer in layers]
        pipelines = [max(a(k, i, s, m - n), cuts[s - 1], t(k, s, j, n)) for s in range(i + 1, j) for n in range(1, m)]
        return min([t(k, i, j, m), *pipelines])

    return a(len(levels) - 1, 0, len(layers), levels[-1][0])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    layers=st.lists(NUMBERS, min_size=1, max_size=5),
    levels=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.5, 2.0, 8.0])), min_size=1, max_size=3),
    price=st.sampled_from(["text", "code"]),
)
def test_the_recurrence_as_written(layers, levels, price):
    costs = [
        jpipe.programs.LayerCost(float(forward), float(backward), outputs=out, weights=weights)
        for forward, backward, out, weights in layers
    ]
    topology = Topology(levels=[{"count": count, "bandwidth": bandwidth} for count, bandwidth in levels])
    result = search_paper(Problem(costs, topology), price)
    assert result.seconds == pytest.approx(recurrence(tuple(layers), tuple(levels), price), rel=1e-9)
    assert [stage.start for stage in result.stages] == [0, *(stage.stop for stage in result.stages[:-1])]
    assert result.stages[-1].stop == len(layers)
    assert result.devices == topology.num_devices


def test_the_stages_of_the_best_partition():
    layers = [jpipe.programs.LayerCost(5.0, 10.0, outputs=1, weights=1), jpipe.programs.LayerCost(2.0, 3.0, outputs=1, weights=100)]
    result = search_paper(Problem(layers, Topology.flat(4, bandwidth=10.0)))
    assert [(stage.stop, stage.first, stage.replicas) for stage in result.stages] == [(1, 0, 3), (2, 3, 1)]
    assert result.seconds == 5.0
    # two servers of two: a stage takes whole components, so the outer level replicates the pipeline inside
    result = search_paper(Problem(layers, Topology(levels=[{"count": 2, "bandwidth": 1.0}, {"count": 2, "bandwidth": 100.0}])))
    assert [(stage.stop, stage.replicas) for stage in result.stages] == [(1, 2), (2, 2)]
    assert result.seconds == 7.5


def test_the_released_code_adds_what_the_text_overlaps():
    layers = [jpipe.programs.LayerCost(4.0, 8.0, weights=10)]
    problem = Problem(layers, Topology.flat(2, bandwidth=4.0))
    assert search_paper(problem, "text").seconds == 6.0
    assert search_paper(problem, "code").seconds == (12 + 4 / 2 * 10 / 4) / 2
