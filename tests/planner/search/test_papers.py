"""Small versions of the papers' examples that `make bench-papers` prints."""

import json

import pytest

from benchmarks.papers import pipedream, stages, two_bw
from benchmarks.papers.models import with_blocks
from benchmarks.papers.partition import evaluate_partition, search_pipedream
from benchmarks.papers.recurrence import search_paper
from benchmarks.planner import __main__ as bench
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from tests.planner.paper_profiles import read, topology

FLAT = {
    "16, 25 Gbit/s": Topology.flat(16, 25e9 / 8),
    "16, 10 Gbit/s": Topology.flat(16, 10e9 / 8),
    "4, 25 Gbit/s": Topology.flat(4, 25e9 / 8),
}


def problem_of(name, cluster):
    return stages.problem_of(read(name), FLAT.get(cluster) or pipedream.machine(cluster))


def speed_up(problem, partition):
    return stages.data_parallel(problem).seconds / evaluate_partition(problem, partition.stages).seconds


@pytest.fixture(scope="module")
def bert():
    return with_blocks(read("bert"), 48)


@pytest.mark.parametrize(("name", "parameters"), [("vgg16", 138_357_544), ("resnet50", 25_557_032)])
def test_profiles_are_of_the_models_that_everybody_knows(name, parameters):
    assert sum(layer.weights for layer in read(name).layers) == 4 * parameters


# PipeDream ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["4 × 4 A", "16, 10 Gbit/s"])
def test_the_dense_layers_of_vgg_on_one_worker(cluster):
    vgg, problem = read("vgg16"), problem_of("vgg16", cluster)
    partition = search_pipedream(problem)
    assert stages.name_of(partition) == "15-1"
    replicated, alone = (vgg.layers[stage.start : stage.stop] for stage in partition.stages)
    assert sum(layer.weights for layer in replicated) < 0.15 * sum(layer.weights for layer in alone)
    assert speed_up(problem, partition) > 1.2


def test_the_recurrence_of_the_paper_on_vgg():
    of_16, of_four = (problem_of("vgg16", cluster) for cluster in ("16, 25 Gbit/s", "4, 25 Gbit/s"))
    assert stages.name_of(search_paper(of_16, "text")) == "15-1"
    assert stages.name_of(search_pipedream(of_16)) == "16"  # its sums are hidden
    assert [stages.name_of(search_paper(of_four, price)) for price in ("text", "code")] == ["3-1", "3-1"]


def layers(times, memory=0):
    """Return a profile of layers that send and sum nearly nothing, for any of the papers' models."""
    at = [[{"forward": time, "backward": 2 * time, "outputs": 1, "residuals": {"none": memory}}] for time in times]
    each = [{"id": f"layer_{n}", "weights": 4, "accumulators": 4, "at": one} for n, one in enumerate(at)]
    return Profile(source="analytic", sizes=[64], inputs=[1], labels=[1], layers=each)


def test_gpipe_waits_for_its_flushes(monkeypatch):
    """With d equal stages and m microbatches it has m / (m + d - 1) of the throughput; devices of 16 GB hold 3 microbatches of 5 GB."""
    monkeypatch.setattr(pipedream, "pipedream_profile", lambda *_: layers([1e-2] * 14, memory=5 * 10**9))
    (table,) = pipedream.section_5_4()
    for row in table.rows:
        _, depth, rate, noam, gpipe, flush, _, most, gpipe_with_most, _, _ = row
        assert (depth, noam, most) == ("14 stages", "14", "3")
        assert gpipe == flush == f"{14 / 27 - 1:+.0%}"
        assert gpipe_with_most == f"{3 / 16 - 1:+.0%}"
        assert float(rate.split()[0]) == pytest.approx(64 / 3e-2 * (1 if row[0].endswith("A") else 15.7 / 14), rel=0.01)


def test_figure_15_beside_its_definition(monkeypatch):
    """Without transfers the slowest stage decides, divided among its replicas."""
    times = [1e-2, 3e-2, *[2e-2] * 14]
    monkeypatch.setattr(pipedream, "FIGURE_15", ("16", "15-1", "8-4-4", "straight"))
    monkeypatch.setattr(pipedream, "pipedream_profile", lambda *_: layers(times))
    (table,) = pipedream.figure_15()
    *rows, last = table.rows
    assert [row[0] for row in rows] == list(pipedream.FIGURE_15)
    assert rows[0][1] == f"{64 * 16 / (3 * sum(times)):.0f}"
    assert rows[-1][1] == f"{64 / (3 * max(times)):.0f}"
    assert {row[3] for row in rows} <= {"+0%", "-0%"}
    assert last[3] == "1.000"


@pytest.mark.parametrize("cluster", ["4 × 4 A", "2 × 8 B"])
def test_resnet_gains_nothing_over_data_parallelism(cluster):
    problem = problem_of("resnet50", cluster)
    assert speed_up(problem, search_pipedream(problem)) == pytest.approx(1, abs=0.1)


def test_gnmt_is_straight_on_one_server_by_the_recurrence():
    assert stages.name_of(search_paper(problem_of("gnmt8", "1 × 4 A"), "code")) == "straight"


def test_the_preprints_cluster_has_a_gpu_in_each_server():
    where = pipedream.machine("8 × 1 V100")
    assert (where.num_devices, where.device.name) == (8, pipedream.machine("1 × 4 A").device.name)
    assert {level.bandwidth for level in where.levels} == {1.25e9}


# 2BW ----------------------------------------------------------------------------------------------------------------------


def test_the_planner_takes_the_depth_of_the_paper(bert):
    ((_, at_full_rate),) = two_bw.best_plans(bert, topology("v100-16gb-8"), (64,))
    assert (at_full_rate.candidate.depth, at_full_rate.candidate.rows) == (8, 1)
    # Recomputation pays off where few rows are slow.
    ((_, with_few_rows_slow),) = two_bw.best_plans(two_bw.with_half_rows(bert, 0.5), topology("v100-16gb-8"), (64,))
    assert with_few_rows_slow.candidate.rows == 4
    assert with_few_rows_slow.candidate.policies.count("full") >= with_few_rows_slow.candidate.depth - 2


def test_speed_ups_are_near_those_of_figure_6_with_20_gb_in_place_of_16(bert):
    """With 16 GB the batch is two rounds of microbatches, so that 2BW gains 1.33 and not 1.6 over a flush."""
    where = topology("v100-16gb-8")
    roomy = where.model_copy(update={"device": where.device.model_copy(update={"memory": 20e9})})  # one round of microbatches fits
    ((batch, rows, rates),) = two_bw.throughputs(bert, roomy, 8, (64,))
    assert (batch, rows) == (64, 8)
    assert rates["pipedream_2bw"] / rates["pipedream_flush"] == pytest.approx(1.6, rel=0.1)
    assert rates["pipedream_flush"] / rates["naive"] == pytest.approx(4.1, rel=0.1)
    assert rates["pipedream_flush"] > rates["gpipe"] > rates["naive"]


def test_recomputation_costs_a_quarter_of_the_throughput(monkeypatch):
    """A forward more beside a forward and a backward of two."""
    monkeypatch.setattr(two_bw, "APPENDIX_B", ("GPT, 2.2B",))
    monkeypatch.setattr(two_bw, "MORE_SIZES", (1, 4))
    monkeypatch.setattr(two_bw, "APPENDIX_B_ROWS", (1, 4))
    monkeypatch.setattr(two_bw, "transformer_profile", lambda *_: with_blocks(read("bert"), 14))
    (table,) = two_bw.appendix_b()
    for _, _, none, _, full, memory in table.rows:
        assert float(full) / float(none) == pytest.approx(0.75, rel=0.05)
        assert memory.endswith(" GB")


@pytest.mark.slow
def test_models_that_fit_in_16_gb(bert):
    none, full = (two_bw.peaks(bert, topology("v100-16gb-8"), 8, 4, 64, policy) for policy in two_bw.POLICIES)
    assert none["gpipe"] > none["pipedream_flush"] > 16e9
    assert 16e9 > full["pipedream"] > full["pipedream_2bw"] > full["pipedream_flush"]
    assert none["pipedream"] > none["pipedream_2bw"] > none["pipedream_flush"]


def test_the_largest_model_grows_with_depth():
    sizes = list(two_bw.largest_models(read("bert"), topology("v100-16gb-64"), 8).values())
    assert sizes == sorted(sizes)
    assert 15e9 < sizes[-1] < 35e9  # figure 9: almost 30 billion


def test_half_of_the_rate_at_half_rows(bert):
    slower = two_bw.with_half_rows(bert, 8.0)
    for before, after in zip(bert.layers, slower.layers, strict=True):
        assert [a.forward / b.forward for b, a in zip(before.at, after.at, strict=True)] == pytest.approx([9, 3, 2])
        assert [a.backward / b.backward for b, a in zip(before.at, after.at, strict=True)] == pytest.approx([9, 3, 2])


# The program --------------------------------------------------------------------------------------------------------------


def test_parts_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "PARTS", {"one": lambda _: [{"seconds": 1.0}], "other": lambda _: pytest.fail("was not asked for")})
    bench.main(["one", "--json", str(tmp_path / "out.json")])
    contents = json.loads((tmp_path / "out.json").read_text())
    assert contents["one"] == [{"seconds": 1.0}]
    assert set(contents) == {"machine", "one"}
    with pytest.raises(SystemExit):
        bench.main(["two"])
    assert "unknown part 'two'; known: one, other" in capsys.readouterr().err
