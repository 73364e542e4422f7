"""`jpipe plan` and `jpipe train --plan auto`: their output, files and pictures; mistakes give one message and exit code 2."""

import dataclasses
import io
import json
import re
from pathlib import Path

import jax
import pytest
import yaml
from rich.console import Console

import jpipe
from jpipe_planner import Profile, Topology
from jpipe_planner.ranking import table
from jpipe_planner.ranking.find import Compiled
from jpipe_train import cli
from jpipe_train.console.progress import Reporter
from jpipe_train.plan import auto, compiling, profiling
from jpipe_train.plan.inputs import Request
from jpipe_train.plan.profiling import sizes_for
from jpipe_train.plan.search import search

IDS = ("embed", "block_0", "head")
MEASURED = "--set=train.steps=8", "--set=train.eval_every=8"  # long enough for a window that is traced
BOTH = "--profile=profile.json", "--topology=two.yaml"
TOPOLOGY = {"format": "jpipe-topology/1", "name": "two", "levels": [{"count": 2, "bandwidth": "1 GB/s"}], "device": {"memory": "1 GB"}}


def profile(ids=IDS, seconds=0.01, weights=10**6) -> Profile:
    """Return a profile of equal layers."""
    at = [
        {"forward": seconds * n, "backward": 2 * seconds * n, "outputs": 100 * n, "residuals": {"none": 10**6 * n, "full": 100 * n}}
        for n in (1, 2)
    ]
    layers = [{"id": i, "weights": weights, "optimizer": 2 * weights, "at": at} for i in ids]
    return Profile(source="measured", sizes=(1, 2), inputs=(8, 16), labels=(8, 16), layers=layers)


@pytest.fixture
def files(tmp_path, tiny, monkeypatch):
    """Change to a folder with a config, a profile of its model and a topology, and return it."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny))
    Path("profile.json").write_text(profile().to_json())
    Path("two.yaml").write_text(yaml.safe_dump(TOPOLOGY))
    return tmp_path


@pytest.fixture
def not_compiled(monkeypatch):
    """Take the estimated memory of a plan for that of its compiled stages."""
    monkeypatch.setattr(compiling, "compile_stages", lambda choice, ranked, *_: Compiled(ranked, ranked.candidate.memory, 0.0, ()))


def planned(capsys, *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.mark.slow
def test_the_best_plan_is_printed_written_and_drawn(files, capsys):
    out = planned(capsys, "tiny.yaml", "--profile=profile.json", "--topology=two.yaml", "--out=plan.json", "--png=p.png", "--explain")
    head = next(line for line in out.splitlines() if line.startswith("rank"))
    for column in (
        "schedule",
        "stages",
        "rows",
        "m",
        "recompute",
        "samples/s",
        "bubble",
        "peak memory",
        "sent/sample",
        "bound by",
    ):
        assert column in head
    assert re.search(r"^1 .* data parallel", out, re.MULTILINE)  # three equal layers on two devices
    parts = r"peak memory [\d.]+ kB \(held [\d.]+ kB, temporary [\d.]+ kB\)"
    assert re.search(rf"stage 0 × 2: embed … head; recompute none; {parts}, estimated [\d.]+ MB \([+-][\d,.]+%\)", out)
    assert "all kinds of plans fit" in out
    assert "train with it: jpipe train tiny.yaml --plan plan.json" in out
    peak = re.search(r"recompute none; peak memory ([\d.]+ kB) ", out)[1]
    assert re.search(rf"^1 .* {re.escape(peak)} \(", out, re.MULTILINE)  # the table has what XLA says
    words = r"estimated except in the first (row|\d rows), compiled for this machine \(cpu\), because the topology's device"
    assert re.search(words, " ".join(out.split()))
    plan = jpipe.Plan.from_json(Path("plan.json").read_text())
    assert plan.layers == IDS
    assert plan.replicas == (2,)
    assert plan.predicted is not None
    assert plan.predicted.batch_seconds == pytest.approx(3 * 2 * 0.03, rel=0.01)
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def sharded_profile(heads: int = 2) -> Profile:
    """Return a profile of layers that can all be sharded."""
    tensor = {"weights": 1.0, "compute": 1.0, "residuals": {"none": 1.0}, "reduced": 8.0, "reductions": 2, "divides": heads}
    return Profile(**profile().model_dump(exclude={"layers"}), layers=[{**one.model_dump(), "tensor": tensor} for one in profile().layers])


@pytest.mark.exhaustive
def test_a_plan_on_a_mesh_is_printed_compiled_and_written(files, capsys):
    Path("profile.json").write_text(sharded_profile().to_json())
    out = planned(capsys, "tiny.yaml", *BOTH, "--mesh=model=2", "--schedules=pipedream_flush", "--out=plan.json", "--explain")
    assert re.search(r"^rank +schedule +stages +mesh ", out, re.MULTILINE)
    assert re.search(r"^1 .* model 2 ", out, re.MULTILINE)
    assert re.search(r"stage 0 on 2 devices \(model 2\): embed … head; recompute none; peak memory [\d.]+ kB ", out)
    stage = jpipe.Plan.from_json(Path("plan.json").read_text()).stages[0]
    assert (dict(stage.mesh), stage.fsdp, stage.replicas) == ({"model": 2}, False, 1)


def test_meshes_are_tried_for_machines_of_a_file_and_can_be_left_out(files, capsys):
    Path("profile.json").write_text(sharded_profile().to_json())
    alone = "--profile=profile.json", "--topology=two.yaml", "--batch=4", "--schedules=pipedream_flush"
    assert "model 2" in planned(capsys, *alone)
    without = planned(capsys, *alone, "--mesh=none")
    Path("profile.json").write_text(profile().to_json())  # which knows nothing of shards
    timeless = [re.sub(r"[\d.]+ s$", "", text, flags=re.MULTILINE) for text in (without, planned(capsys, *alone))]
    assert timeless[0] == timeless[1]
    assert "mesh" not in without


def test_a_mesh_larger_than_a_server_costs_more(files, capsys):
    Path("profile.json").write_text(sharded_profile(4).to_json())
    levels = [{"count": 2, "bandwidth": "10 GB/s", "name": "NVLink"}, {"count": 2, "bandwidth": "2 GB/s"}]
    Path("two.yaml").write_text(yaml.safe_dump({**TOPOLOGY, "levels": levels}))
    out = planned(capsys, *BOTH, "--batch=4", "--mesh=model=4")
    assert "a mesh (model 4) is larger than the 2 devices of NVLink: its sums and gathers take longer" in out
    assert "larger" not in planned(capsys, *BOTH, "--batch=4")


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("model=3", "expected a size of model that divides 2 and .* found 3"),
        ("tensor=2", "--mesh: expected none, or sizes of axes such as model=8 .* found 'tensor=2'"),
        ("data=4", "mesh: expected meshes that fill the machine evenly, of 1, 2 devices, found one of 4"),
        ("data=8", "expected a size of data that divides one of the microbatch sizes, 1, 2, found 8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(files, capsys, mesh, words):
    known = sharded_profile()
    if mesh == "data=4":  # whose rows would do
        known = Profile(**known.model_dump() | {"sizes": (1, 4)})
    Path("profile.json").write_text(known.to_json())
    assert cli.main(["plan", *BOTH, "--batch=4", f"--mesh={mesh}"]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_on_a_narrow_terminal_the_table_continues_below():
    screen = io.StringIO()
    reporter = Reporter(1, 1, "samples", Console(file=screen, width=24))
    reporter.table(
        ("rank", "word", "number", "last words"), [("1", "a", "22", "one"), ("10", "b", "3", "the others")], ("word", "last words")
    )
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert lines == ["rank  word  number", "1     a         22", "10    b          3", "rank  last words", "1     one", "10    the others"]


@pytest.mark.slow
def test_the_written_plan_trains_and_is_compared_with_its_prediction(files, capsys):
    planned(capsys, "tiny.yaml", "--profile=profile.json", "--topology=two.yaml", "--out=plan.json", "--schedules=pipedream_2bw")
    assert cli.main(["train", "tiny.yaml", "--plan=plan.json", *MEASURED]) == 0
    out = capsys.readouterr().out
    assert re.search(r"planned +measured +ratio", out)
    assert re.search(r"peak memory, stage 0 ", out)
    recorded = json.loads((files / "run" / "planned.json").read_text())
    assert recorded["predicted"] == jpipe.Plan.from_json(Path("plan.json").read_text()).predicted.model_dump(mode="json")
    assert recorded["measured"]["batch_seconds"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_auto_profiles_plans_and_trains(files, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(profiling, "measure", lambda *model, **options: seen.append(model) or profile())
    monkeypatch.setattr(auto, "cores_of", lambda *_: None)
    monkeypatch.setattr(auto, "local_topology", lambda cores: Topology.flat(2, 1e9))
    assert cli.main(["train", "tiny.yaml", "--plan=auto", *MEASURED]) == 0
    out = capsys.readouterr().out
    assert seen[0][-1] == sizes_for(4, jax.device_count(), profiling.MEASURED_SIZES)
    assert re.search(r"plan: .* with .* stages, \d microbatch(es)? of \d rows?, expected .* samples/s; the best of \d+ candidates", out)
    assert re.search(r"planned +measured +ratio", out)
    assert yaml.safe_load((files / "run" / "config.yaml").read_text())["plan"] == {"file": "auto"}
    assert jpipe.Plan.from_json((files / "run" / "plan.json").read_text()).layers == IDS


def test_a_profile_alone_is_planned_for_a_file(files, capsys):
    out = planned(capsys, "--profile=profile.json", "--topology=two.yaml", "--batch=4", "--out=plan.json")
    assert "memory is estimated from the profile" in out
    assert "train with it" not in out
    assert jpipe.Plan.from_json(Path("plan.json").read_text()).layers == IDS


def test_a_graph_of_the_original_is_planned(files, capsys):
    node = "node{} -- Dense -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=40.0"
    Path("graph.txt").write_text("\n".join([node.format(1), node.format(2), "\tnode1 -- node2"]) + "\n")
    out = planned(capsys, "--profile=graph.txt", "--rows=2", "--topology=two.yaml", "--batch=8", "--out=plan.json")
    assert "imported profile of 2 layers" in out
    assert "say how many" not in out
    assert jpipe.Plan.from_json(Path("plan.json").read_text()).layers == ("node1", "node2")


def test_a_graph_without_rows_has_one_row_with_a_warning(files, capsys):
    Path("graph.txt").write_text(
        "node1 -- Dense -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=40.0\n"
    )
    out = planned(capsys, "--profile=graph.txt", "--topology=two.yaml", "--batch=8")
    assert "microbatches of 1 row: say how many with --rows\n" in out


def test_unused_devices_stay_idle_and_are_reported(files, capsys):
    Path("many.yaml").write_text(yaml.safe_dump(TOPOLOGY | {"levels": [{"count": 16, "bandwidth": "1 GB/s"}]}))
    out = planned(capsys, "--profile=profile.json", "--topology=many.yaml", "--batch=2")
    assert re.search(r"it uses \d of 16 devices; the remaining devices", out)


@pytest.mark.usefixtures("not_compiled")
def test_with_clipping_pipedream_is_ranked_with_vertical_sync(files, capsys):
    """At equal speed its weights are newer than those of 2BW, and the pipeline accepts the plan with the global norm."""
    slow = [layer.model_copy(update={"weights": 10**8, "accumulators": 10**8, "optimizer": 0}) for layer in profile().layers]
    Path("heavy.json").write_text(Profile(**dict(profile()) | {"layers": slow}).to_json())  # too heavy to replicate
    arguments = "tiny.yaml", "--profile=heavy.json", "--topology=two.yaml", "--set", "optimizer.clip_global_norm=1.0", "--out=plan.json"
    out = planned(capsys, *arguments, "--schedules=pipedream,pipedream_2bw", "--set=train.batch_size=4")
    needs = "optimizer.clip_global_norm, skip_nonfinite or a dynamic loss scale"
    assert f"pipedream is tried with vertical_sync and equal pipelines only, because of {needs}" in " ".join(out.split())
    assert re.search(r"^1 +pipedream vertical sync .* \d+% +0.25 ", out, re.MULTILINE)
    assert re.search(r"^\d+ +pipedream_2bw .* \d+% +1 ", out, re.MULTILINE)
    plan = jpipe.Plan.from_json(Path("plan.json").read_text())
    assert (plan.schedule, plan.vertical_sync, plan.depth) == ("pipedream", True, 2)
    jpipe.lower(plan, 2, global_norm=True)


@pytest.mark.usefixtures("not_compiled")
def test_schedules_that_cannot_clip_are_left_out(files, capsys, monkeypatch):
    rules = jpipe.schedules.SCHEDULES["pipedream"]
    monkeypatch.setitem(jpipe.schedules._BY_NAME, "pipedream", dataclasses.replace(rules, options=("extra_in_flight",)))
    arguments = "tiny.yaml", *BOTH, "--set=optimizer.clip_global_norm=1.0"
    out = " ".join(planned(capsys, *arguments, "--schedules=all", "--out=plan.json").split())
    needs = "optimizer.clip_global_norm, skip_nonfinite or a dynamic loss scale"
    assert f"left out, because of {needs}: pipedream: expected no early updates " in out
    assert cli.main(["plan", *arguments, "--schedules=pipedream"]) == 2
    assert f"--schedules: pipedream cannot be used with {needs}: expected no early updates" in capsys.readouterr().err


def test_with_shared_parameters_pipedream_has_vertical_sync(files, capsys):
    parameter = {"layers": ("embed", "head"), "weights": 10**5, "accumulators": 10**5}
    Path("shared.json").write_text(Profile(**dict(profile()) | {"shared": [parameter]}).to_json())
    arguments = "plan", "--profile=shared.json", "--topology=two.yaml", "--batch=4"
    out = planned(capsys, *arguments[1:], "--schedules=pipedream,pipedream_2bw")
    assert "pipedream is tried with vertical_sync and equal pipelines only, because of shared parameters" in " ".join(out.split())
    assert re.search(r"^\d+ +pipedream vertical sync ", out, re.MULTILINE)
    assert cli.main([*arguments, "tiny.yaml"]) == 2
    assert "profile: expected layers that share a parameter: none; found embed, head; profile this model" in capsys.readouterr().err


def test_a_model_that_does_not_fit_reports_the_missing_bytes_and_advice(files, capsys):
    Path("big.json").write_text(profile(weights=10**9).to_json())
    assert cli.main(["plan", "--profile=big.json", "--topology=two.yaml", "--batch=4", "--out=plan.json"]) == 2
    err = capsys.readouterr().err
    assert re.search(r"no plan fits: nearest is .*, where stage \d needs [\d.]+ GB of 1 GB, [\d.]+ GB too much", err)
    assert "what would make it fit: " in err
    assert "devices" in err
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"expected a CONFIG or --profile FILE, found neither"),
        (["--profile=profile.json"], r"--topology: a profile is planned for machines that a file describes"),
        ([*BOTH], r"--batch: a profile does not say how many rows"),
        ([*BOTH, "--batch=0"], r"--batch: expected 1 or more, found 0"),
        ([*BOTH, "--batch=4", "--agree=0"], r"--agree: expected 1 or more, found 0"),
        (
            ["tiny.yaml", *BOTH, "--set=plan.agree={every: 9, delay: 3}", "--agree=3"],
            r"--agree: delay: expected less than every, 3, because .*, found 3",
        ),
        (
            [*BOTH, "--batch=4", "--agree=9", "--pipedream=replicas"],
            r"--pipedream: expected no --agree with 'replicas', found 9: .* equally many replicas; leave one of them out",
        ),
        (
            ["tiny.yaml", *BOTH, "--set=plan.agree={every: 9}", "--pipedream=replicas"],
            r"--pipedream: expected no plan.agree with 'replicas': .*; leave one of them out",
        ),
        ([*BOTH, "--batch=4", "--max-delay=-0.5"], r"--max-delay: expected 0 or more updates, found -0.5"),
        ([*BOTH, "--batch=4", "--max-delay=nan"], r"--max-delay: expected 0 or more updates, found nan"),
        ([*BOTH, "--batch=4", "--max-delay=inf"], r"--max-delay: expected 0 or more updates, found inf"),
        (["tiny.yaml", "--set=plan.max_delay=-1"], r"plan.max_delay: .*greater than or equal to 0.*-1"),
        (
            [*BOTH, "--batch=4", "--max-delay=0.1", "--schedules=pipedream_2bw"],
            r"no plan with pipedream_2bw and a mean delay of at most 0.1 updates .*allow a larger delay, other schedules, batches",
        ),
        ([*BOTH, "--batch=4", "--rows=0"], r"--rows: expected 1 or more, found 0"),
        (["tiny.yaml", "--devices=0"], r"--devices: expected 1 or more, found 0"),
        (["tiny.yaml", "--measure=0"], r"--measure: expected 1 or more, found 0"),
        (
            ["tiny.yaml", "--topology=two.yaml", "--coordinator=127.0.0.1:9"],
            r"--coordinator: several processes plan only with --topology local; remove --coordinator",
        ),
        (
            ["tiny.yaml", "--topology=two.yaml", "--num-processes=2"],
            r"--num-processes: several processes plan only with --topology local; remove --num-processes",
        ),
        (["tiny.yaml", "--measure=2", "--topology=two.yaml"], r"--measure: .*--topology local, .*found --topology two.yaml; leave it out"),
        ([*BOTH, "--batch=4", "--measure=2"], r"--measure: expected a CONFIG .*found --profile alone; leave it out"),
        (["--profile=profile.json", "--topology=no.yaml", "--batch=4"], r"--topology: cannot read 'no.yaml': No such file"),
        (["--profile=no.json", "--topology=two.yaml", "--batch=4"], r"--profile: cannot read 'no.json': No such file"),
        (["--profile=two.yaml", "--topology=two.yaml", "--batch=4"], r"two.yaml: expected a profile as JSON"),
        (
            ["--profile=profile.json", "--topology=profile.json", "--batch=4"],
            r"profile.json: expected YAML with 'format: jpipe-topology/1'",
        ),
        (
            ["tiny.yaml", *BOTH, "--set", "model.depth=2"],
            r"profile: layer 2 is 'head', the model has",
        ),
        (
            ["tiny.yaml", *BOTH, "--schedules=gpip"],
            r"unknown schedule 'gpip'; did you mean 'gpipe'",
        ),
        (["tiny.yaml", *BOTH, "--set=plan.slices=2"], r"slices: expected a profile with the costs of half rows, found one without"),
        (["tiny.yaml", *BOTH, "--out=plan.yaml"], r"--out: expected a name that ends in .json"),
        (["tiny.yaml", *BOTH, "--png=no/p.png"], r"--png: there is no folder for 'no/p.png'"),
        (
            ["tiny.yaml", *BOTH, "--set", "plan.num_stages=3"],
            r"has no effect with plan.file",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(files, capsys, arguments, message):
    code = cli.main(["plan", *arguments])
    printed = capsys.readouterr()
    assert code == 2
    assert re.search(message, printed.err)
    assert "Traceback" not in printed.err


def test_sizes_are_divisors_of_the_batch_up_to_twice_the_share_of_a_device():
    assert sizes_for(32, 2, 4) == (4, 8, 16, 32)
    assert sizes_for(32, 4, 6) == (1, 2, 4, 8, 16)
    assert sizes_for(7, 1, 4) == (1, 7)
    assert sizes_for(2048, 64, 6) == (2, 4, 8, 16, 32, 64)
    assert sizes_for(2, 64, 6) == (1,)
    assert all(60 % rows == 0 for rows in sizes_for(60, 3, 6))


@pytest.mark.slow
def test_the_printed_command_has_all_options_of_the_plan(files, capsys):
    arguments = "tiny.yaml", *BOTH, "--batch=8", "--set", "optimizer.learning_rate=0.02", "--out=plan.json", "--schedules=gpipe"
    out = planned(capsys, *arguments)
    assert "train with it: jpipe train tiny.yaml --plan plan.json --set optimizer.learning_rate=0.02 --set train.batch_size=8\n" in out


@pytest.mark.exhaustive
def test_plans_of_one_stage_need_no_vertical_sync(files, capsys):
    arguments = "tiny.yaml", *BOTH, "--set", "optimizer.clip_global_norm=1.0", "--schedules=pipedream", "--out=plan.json"
    planned(capsys, *arguments)
    plan = jpipe.Plan.from_json(Path("plan.json").read_text())
    assert (plan.schedule, plan.vertical_sync, plan.depth, len(plan.workers)) == ("pipedream", False, 1, 2)
    jpipe.lower(plan, 2, global_norm=True)


def test_no_device_may_stay_idle_where_each_is_a_process():
    topology = Topology.flat(7, 1e9)
    result = search(profile(), topology, 8, Request(), False, Reporter(1, 1, "samples"))
    assert any(ranked.candidate.devices < 7 for ranked in result.choice.ranked)
    most = max(candidate.devices for candidate in result.candidates)
    refusal = f"no plan has a batch of 8 rows on all of 7 devices, only on {most}; use {most} devices, or allow other batches"
    with pytest.raises(jpipe.InputError, match=refusal):
        search(profile(), topology, 8, Request(all_devices=True), False, Reporter(1, 1, "samples"))


def test_a_model_without_replicas_on_more_processes_than_layers_is_reported():
    layers, topology = len(profile().layers), Topology.flat(7, 1e9)
    alone = Request(replicas=False, meshes=("none",))
    result = search(profile(), topology, 8, alone, False, Reporter(1, 1, "samples"))
    assert {max(candidate.replicas) for candidate in result.candidates} == {1}
    assert max(candidate.devices for candidate in result.candidates) == layers < 7
    refusal = f"on all of 7 devices, only on {layers}: layers carry their state .*, so stages have no replicas, and {layers} layers make"
    with pytest.raises(jpipe.InputError, match=refusal) as refused:
        search(profile(), topology, 8, dataclasses.replace(alone, all_devices=True), False, Reporter(1, 1, "samples"))
    assert str(refused.value).endswith(f"use {layers} devices, or a model of more layers")


def test_a_faster_plan_with_delayed_weights_is_one_line_unless_requested(files, capsys, monkeypatch):
    Path("three.yaml").write_text(yaml.safe_dump(TOPOLOGY | {"levels": [{"count": 3, "bandwidth": "10 GB/s"}], "device": {}}))
    slow = [layer.model_copy(update={"weights": 10**10, "accumulators": 10**10, "optimizer": 0}) for layer in profile().layers]
    Path("heavy.json").write_text(Profile(**dict(profile()) | {"layers": slow, "dispatch": 0.05}).to_json())  # too heavy to replicate
    arguments = "--profile=heavy.json", "--topology=three.yaml", "--batch=4"
    out = " ".join(planned(capsys, *arguments).split())
    faster = re.search(
        r"only schedules that flush were considered; pipedream(_2bw)?.*, with delayed weights, would be about (\d+)% faster: ", out
    )
    longer = re.search(r"price of the flush: per sample, .* takes 1\.(\d\d) times as long", out)
    assert int(faster[2]) == int(longer[1])  # both lines have the simulated speeds
    assert not re.search(r" 1 pipedream(_2bw)? ", out)
    price = (
        r"price of the flush: per sample, (one stage on one device|[a-z_0-9]+ with \d stages) takes 1\.\d\d times as long "
        r"as pipedream(_2bw)?( \+\d)? with 3 stages "
    )
    pays = (
        r"the asynchronous plan pays if it reaches the same loss with fewer than 1\.\d\d times the samples "
        r"\(docs/explanation/learning.md\)"
    )
    compared = price + r"\(mean delay [\d.]+\) " + pays
    assert re.search(compared, out)
    output = " ".join(planned(capsys, *arguments, "--schedules=all").split())
    assert "only schedules that flush" not in output
    assert re.search(r" 1 pipedream(_2bw)? ", output)
    assert re.search(compared, output)
    bounded = " ".join(planned(capsys, *arguments, "--max-delay=0").split())
    assert "only schedules that flush" not in bounded
    assert "pipedream_2bw" not in bounded
    assert "price of the flush" not in bounded
    priced = table.price_of_flush

    def free(choice, delayed):
        slower = dataclasses.replace(delayed.simulated, batch_seconds=choice.ranked[0].seconds)
        return priced(choice, dataclasses.replace(delayed, simulated=slower))

    monkeypatch.setattr(table, "price_of_flush", free)
    out = " ".join(planned(capsys, *arguments).split())
    assert "price of the flush: none; " in out
    assert "only schedules that flush" not in out


@pytest.mark.usefixtures("not_compiled")
def test_the_delay_is_bounded_by_the_option_or_by_the_config(files, capsys):
    slow = [layer.model_copy(update={"weights": 10**8, "accumulators": 10**8, "optimizer": 0}) for layer in profile().layers]
    Path("heavy.json").write_text(Profile(**dict(profile()) | {"layers": slow, "dispatch": 0.05}).to_json())
    Path("two.yaml").write_text(yaml.safe_dump(TOPOLOGY | {"device": {}}))
    machines = "--profile=heavy.json", "--topology=two.yaml"

    def delays(*arguments):
        out = planned(capsys, *machines, *arguments, "--out=plan.json")
        plan = jpipe.Plan.from_json(Path("plan.json").read_text())
        assert plan.predicted.delay == plan.mean_delay
        rows = re.findall(r"^\d+ +(\S+) .* \d+% +([\d.]+) +[\d.,]+ [kMG]?B", out, re.MULTILINE)
        assert len(rows) > 2
        return plan, {name for name, _ in rows}, max(float(delay) for _, delay in rows)

    plan, schedules, most = delays("--batch=4", "--max-delay=1")
    assert (plan.depth, plan.mean_delay, most) == (1, 1, 1)  # data parallelism, whose sum is hidden behind the next update's computations
    assert {"data", "pipedream"} <= schedules
    plan, schedules, most = delays("--batch=4", "--max-delay=0.5")
    assert plan.schedule == "pipedream"
    assert 0 < plan.mean_delay <= most <= 0.5
    assert "pipedream_2bw" not in schedules
    assert delays("--batch=4", "--max-delay=0")[2] == 0
    assert delays("tiny.yaml", "--set=plan.max_delay=0.5")[0].schedule == "pipedream"
    assert delays("tiny.yaml", "--set=plan.max_delay=0.5", "--max-delay=0")[2] == 0


@pytest.mark.usefixtures("not_compiled")
def test_plans_agree_or_compress_messages_if_the_option_or_the_config_says_so(files, capsys):
    Path("two.yaml").write_text(yaml.safe_dump(TOPOLOGY | {"device": {}}))
    Path("one.yaml").write_text(yaml.safe_dump(TOPOLOGY | {"levels": [{"count": 1, "bandwidth": "1 GB/s"}], "device": {}}))

    def plan_of(*arguments):
        out = planned(capsys, *BOTH, *arguments, "--schedules=pipedream_flush", "--out=plan.json")
        return jpipe.Plan.from_json(Path("plan.json").read_text()), out

    plan, out = plan_of("--batch=4", "--agree=50")
    assert (plan.agree.every, plan.depth) == (50, 1)
    assert "data parallel, agree every 50 " in out
    assert " late" not in out
    plan, out = plan_of("tiny.yaml", "--set=plan.agree={every: 20, delay: 5, outer: {momentum: 0}}")
    assert (plan.agree.every, plan.agree.delay, plan.agree.outer.momentum) == (20, 5, 0)
    assert "data parallel, agree every 20, 5 late " in out
    plan, _ = plan_of("tiny.yaml", "--set=plan.agree={every: 20, outer: {momentum: 0}}", "--agree=7")
    assert (plan.agree.every, plan.agree.outer.momentum) == (7, 0)
    plan, out = plan_of("--batch=4", "--agree=50", "--topology=one.yaml")
    assert plan.agree is None
    assert "agree has no effect: the chosen plan has only one pipeline" in out
    _, out = plan_of("tiny.yaml", "--set=plan.links={activations: int8}")
    assert " links int8/– " in out
    assert cli.main(["plan", *BOTH, "tiny.yaml", "--set=plan.links={sums: int8}", "--out=plan.json"]) == 2
    assert (
        "plan.links.sums: expected no search for a plan with 'int8': a search cannot price compressed sums; remove it"
        in capsys.readouterr().err
    )
    ids = *IDS[:2], "bottleneck.block_0.down", "bottleneck.block_0.up", IDS[2]
    Path("profile.json").write_text(profile(ids).to_json())
    plan, out = plan_of("tiny.yaml", "--set=plan.links={bottleneck: {width: 2, after: [block_0]}}")
    assert (plan.links.bottleneck.after, plan.layers) == (("block_0",), ids)
    assert cli.main(["plan", *BOTH, "tiny.yaml", "--set=plan.links={bottleneck: {width: 2}}", "--out=plan.json"]) == 2
    assert "plan.links.bottleneck: expected no search for a plan with" in capsys.readouterr().err
    Path("profile.json").write_text(profile().to_json())
    plan, out = plan_of("tiny.yaml")
    assert plan.agree is plan.links is None
    assert "agree" not in out
    assert "links int8" not in out


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.slow
def test_all_plans_have_the_slices_of_the_config(files, capsys):
    out = planned(capsys, "tiny.yaml", "--topology=two.yaml", "--set=plan.slices={count: 2, by: cost}", "--out=plan.json")
    plan = jpipe.Plan.from_json(Path("plan.json").read_text())
    assert plan.slices == jpipe.plan.ByCost(count=2, by="cost")
    ranked = [line for line in out.splitlines() if re.match(r"\d+ ", line)]
    assert ranked
    assert all(" 2 slices" in line for line in ranked)
    assert "--set plan.slices" not in out


@pytest.mark.usefixtures("not_compiled")
def test_what_no_device_can_hold_waits_in_host_memory_and_if_asked_what_makes_plans_faster(files, capsys):
    mb, sizes = 10**6, {"none": 8 * 10**6, "full": 4 * 10**6}
    at = {"forward": 0.01, "backward": 0.02, "outputs": 4 * mb, "residuals": sizes}
    layers = [{"id": i, "weights": 10 * mb, "optimizer": 20 * mb, "at": [at]} for i in IDS]
    Path("large.json").write_text(
        Profile(source="analytic", sizes=(1,), inputs=(4 * mb,), labels=(8,), layers=layers, dispatch=1e-4).to_json()
    )

    def plan_of(memory, *arguments):
        device = {"memory": memory, "host": {"bandwidth": "4 GB/s"}}
        Path("two.yaml").write_text(yaml.safe_dump(TOPOLOGY | {"device": device}))
        out = planned(
            capsys, "--profile=large.json", "--topology=two.yaml", "--batch=8", "--schedules=gpipe", "--out=plan.json", *arguments
        )
        return jpipe.Plan.from_json(Path("plan.json").read_text()), out

    plan, out = plan_of("150 MB")  # the first stage needs 160 MB, though it recomputes
    assert len(plan.offload.residuals) == 1
    assert max(plan.predicted.peak_bytes) <= 150 * mb
    assert re.search(r"gpipe offload optimizer \d, residuals \d .* \(offload [\d.]+% slower\)", out)
    recomputing, _ = plan_of("170 MB")
    assert recomputing.offload is None
    assert "full" in {stage.recompute for stage in recomputing.stages}
    moving, _ = plan_of("170 MB", "--offload")
    assert moving.offload.residuals
    assert {stage.recompute for stage in moving.stages} == {"none"}
    assert moving.predicted.batch_seconds < recomputing.predicted.batch_seconds
    slow, _ = plan_of("1 GB", "--offload")
    assert slow.offload is None, "where everything fits nothing is moved"
