"""The papers' examples, small: what `make bench-planner` prints at length."""

import json

import pytest

from benchmarks.planner import __main__ as bench
from benchmarks.planner import paper_2bw, paper_pipedream, speed
from planner.machine.topology import Topology
from planner.search.pipedream import search
from tests.planner.paper_profiles import read, topology

CLUSTERS = paper_pipedream.topologies()


@pytest.fixture(scope="module")
def gpt_2b():
    return paper_2bw.with_blocks(read("gpt"), 48)


@pytest.mark.parametrize(("name", "parameters"), [("vgg16", 138_357_544), ("resnet50", 25_557_032)])
def test_profiles_are_of_the_models_that_everybody_knows(name, parameters):
    assert sum(layer.weights for layer in read(name).layers) == 4 * parameters


# PipeDream ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["4 × 4 A", "16, 10 Gbit/s"])
def test_the_dense_layers_of_vgg_on_one_worker(cluster):
    vgg = read("vgg16")
    found = search(paper_pipedream.problem_of(vgg, CLUSTERS[cluster], "replicas"))
    assert paper_pipedream.stages(found) == "15-1"
    replicated, alone = (vgg.layers[stage.start : stage.stop] for stage in found.stages)
    assert {"fc6", "fc7", "fc8"} <= {layer.id for layer in alone}
    assert sum(layer.weights for layer in replicated) < 0.1 * sum(layer.weights for layer in alone)
    assert paper_pipedream.compare(vgg, CLUSTERS[cluster])["own"]["speed_up"] > 1.2


def test_the_recurrence_of_the_paper_on_vgg():
    of_16 = paper_pipedream.compare(read("vgg16"), CLUSTERS["16, 25 Gbit/s"])
    assert of_16["text"]["stages"] == "15-1"
    assert of_16["own"]["stages"] == "16"  # its sums are hidden
    of_four = paper_pipedream.compare(read("vgg16"), CLUSTERS["4, 25 Gbit/s"])
    assert (of_four["text"]["stages"], of_four["code"]["stages"]) == ("3-1", "3-1")


@pytest.mark.parametrize("cluster", ["4 × 4 A", "2 × 8 B"])
def test_resnet_gains_nothing_over_data_parallelism(cluster):
    assert paper_pipedream.compare(read("resnet50"), CLUSTERS[cluster])["own"]["speed_up"] == pytest.approx(1, abs=0.1)


def test_gnmt_is_straight_on_one_server_by_the_recurrence():
    assert paper_pipedream.compare(read("gnmt8"), CLUSTERS["1 × 4 A"])["code"]["stages"] == "1-1-1-1"


# 2BW ----------------------------------------------------------------------------------------------------------------------


def test_the_planner_takes_the_depth_of_the_paper(gpt_2b):
    (at_full_rate,) = paper_2bw.chosen(gpt_2b, topology("v100-16gb-8"), (64,))
    assert (at_full_rate["depth"], at_full_rate["rows"], at_full_rate["recomputing_stages"]) == (8, 1, 0)
    # Recomputation pays off where few rows are slow.
    (with_few_rows_slow,) = paper_2bw.chosen(paper_2bw.with_half_rows(gpt_2b, 0.5), topology("v100-16gb-8"), (64,))
    assert (with_few_rows_slow["depth"], with_few_rows_slow["rows"]) == (8, 8)
    assert with_few_rows_slow["recomputing_stages"] >= 6


def test_speed_ups_are_near_those_of_figure_6(gpt_2b):
    (small,) = paper_2bw.speed_ups(gpt_2b, topology("v100-16gb-8"), 8, (64,))
    rates = small["samples_per_second"]
    assert small["rows"] == 8
    assert rates["pipedream_2bw"] / rates["pipedream_flush"] == pytest.approx(1.6, rel=0.1)
    assert rates["pipedream_flush"] / rates["naive"] == pytest.approx(4.1, rel=0.1)
    assert rates["pipedream_flush"] > rates["gpipe"] > rates["naive"]


def test_who_fits_in_16_gb():
    large = paper_2bw.with_blocks(read("gpt"), 48, (8,))
    none, full = paper_2bw.memory(large, topology("v100-16gb-8"), 8, 64)
    assert (none["recompute"], full["recompute"], full["rows"]) == ("none", "full", 8)
    assert none["gpipe"] > none["pipedream_flush"] > 16e9
    assert full["pipedream"] > 16e9 > full["pipedream_2bw"] > full["pipedream_flush"]


def test_the_largest_model_grows_with_depth():
    found = [row["parameters"] for row in paper_2bw.largest_models(read("gpt"), topology("v100-16gb-64"), 8)]
    assert found == sorted(found)
    assert 20e9 < found[-1] < 35e9  # figure 9: almost 30 billion


def test_half_of_the_rate_at_half_rows(gpt_2b):
    slower = paper_2bw.with_half_rows(gpt_2b, 8.0)
    for before, after in zip(gpt_2b.layers, slower.layers, strict=True):
        assert [a.forward / b.forward for b, a in zip(before.at, after.at, strict=True)] == pytest.approx([9, 2])
        assert [a.backward / b.backward for b, a in zip(before.at, after.at, strict=True)] == pytest.approx([9, 2])


# The program --------------------------------------------------------------------------------------------------------------


def test_invented_models_are_cut(monkeypatch):
    problem = speed.invented(40, Topology.flat(16, 1e9))
    assert len(search(problem).stages) > 1
    assert problem.layers == speed.invented(40, Topology.flat(16, 1e9)).layers
    limited = speed.with_limit(problem)
    found = search(limited)
    assert found.over is None
    assert max(found.memory) <= limited.memory < max(search(problem).memory)


def test_parts_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "PARTS", {"one": lambda _: [{"seconds": 1.0}], "other": lambda _: pytest.fail("was not asked for")})
    bench.main(["one", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["one"] == [{"seconds": 1.0}]
    assert set(found) == {"machine", "one"}
    with pytest.raises(SystemExit):
        bench.main(["two"])
    assert "unknown part 'two'; known: one, other" in capsys.readouterr().err
