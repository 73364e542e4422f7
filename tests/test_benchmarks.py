"""The computations of the benchmarks, which must compare equal models."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import sys
import textwrap
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import jpipe
from benchmarks import cross_entropy, dispatch, gpt, gpu, recipes, transfers
from benchmarks.hosts import __main__ as hosts
from benchmarks.hosts import accuracy, accuracy_draw, accuracy_program, links, network, tasks
from benchmarks.hosts.models import KINDS, WORKLOADS, kinds, make_plan, sizes
from benchmarks.papers import __main__ as papers
from benchmarks.papers import draw, stages
from benchmarks.papers.document import put
from benchmarks.papers.partition import Placed, Problem, evaluate_partition
from benchmarks.peers.entries import CEILING_ENTRY, ENTRIES, goals
from benchmarks.planner.here import legal_plans
from benchmarks.programs import Program, ProgramFailed, steps_per_second
from benchmarks.sizes import GPU, PEERS, TINY
from examples.papers.samples import make
from jpipe.capabilities.agreement.option import agreement_applied, agrees
from jpipe_planner import Profile, Topology

CORE = min(os.sched_getaffinity(0))
DENSE = jpipe.Layer(
    lambda key, x: ({"w": jax.random.normal(key, (x.shape[-1], 4)) / 2}, {}),
    lambda p, state, x, key, train: (jax.numpy.tanh(x @ p["w"]), state),
)


def squares(y, labels):
    return ((y - labels) ** 2).sum(), jax.numpy.float32(len(y))


@pytest.fixture(autouse=True)
def promotion():
    """Allow standard promotion, which optax and JAX's attention in bfloat16 need."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def program(body, processes=1):
    """Return a benchmark program whose processes run `body`."""
    command = [sys.executable, "-c", "from benchmarks.serve import *\nimport sys\n" + textwrap.dedent(body)]
    return Program("tried", [command] * processes, [CORE] * processes)


@pytest.fixture
def quickly_compiled():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# Schedules ------------------------------------------------------------------------------------------------------------


def test_dispatch_is_measured_for_every_schedule_that_makes_its_order():
    plans = dispatch.plans()
    assert set(jpipe.schedules.SCHEDULES) - set(plans) == {"auto_zero_bubble"}
    for plan in plans.values():
        assert jpipe.lower(plan, 2).instructions


def test_plans_that_are_measured_here_have_a_rank_for_each_process():
    plans = [plan for plan, _ in legal_plans(2)]
    assert {plan.schedule for plan in plans} >= {"pipedream_flush", "pipedream", "pipedream_2bw", "gpipe", "naive"}
    assert {len(plan.rank_workers) for plan in plans} == {2}


# Rates --------------------------------------------------------------------------------------------------------------------


def test_the_rate_of_one_process_starts_at_its_first_step():
    assert steps_per_second([[100.0, 100.5, 101.0, 102.0]]) == 3 / 2


def test_jobs_add_up_while_all_of_them_run():
    fast = [float(t) for t in np.arange(0, 20, 0.5)]  # two a second, long before and after the other
    slow = [4.0, 5.0, 6.0, 8.0]  # three in four seconds
    assert steps_per_second([fast, slow]) == pytest.approx(2 + 3 / 4)
    assert steps_per_second([[0.0, 2.0], [1.0, 3.0]]) == pytest.approx(1 / 2 + 1 / 2)  # parts of steps


def test_jobs_one_after_the_other_are_refused():
    with pytest.raises(ValueError, match="did not run at the same time"):
        steps_per_second([[0.0, 1.0], [1.0, 2.0]])


# Programs -----------------------------------------------------------------------------------------------------------------


def test_processes_run_together_and_are_gone_at_the_end():
    body = """
        import os
        print("gloo says hello")  # no line of ours
        serve(lambda steps: {"ends": [0.0] * steps, "cores": sorted(os.sched_getaffinity(0))}, process=os.getpid())
    """
    with program(body, processes=2) as running:
        processes = [fact["process"] for fact in running.facts(60)]
        assert [len(answer["ends"]) for answer in running.run(3, 60)] == [3, 3]
        assert [answer["cores"] for answer in running.run(2, 60)] == [[CORE], [CORE]]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_program_that_fails_reports_the_reason():
    body = """
        print("{}", flush=True)
        sys.stdin.readline()
        import atexit
        atexit.register(lambda: print("FATAL: noise of the end", file=sys.stderr))
        raise ValueError("no room")
    """
    with program(body) as running:
        running.facts(60)
        with pytest.raises(ProgramFailed, match=r"tried: a process ended with exit code 1: ValueError: no room"):
            running.run(2, 60)


def test_a_program_that_hangs_is_killed():
    with program("import time; time.sleep(600)") as running, pytest.raises(ProgramFailed, match="no answer within 0 s"):
        running.facts(0.2)


# The model ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [PEERS, GPU, TINY])
def test_all_programs_train_as_many_parameters(sizes):
    params = jax.eval_shape(lambda key: gpt.init(sizes, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sizes.parameters
    assert gpt.count_parameters(gpt.stack(sizes), gpt.data(sizes, 1)[0]) == sizes.parameters


@pytest.mark.exhaustive
def test_the_layers_compute_what_the_plain_step_does(quickly_compiled):
    batch, stack = gpt.data(TINY, 1), gpt.stack(TINY)
    plain = gpt.PlainStep(TINY, 1, batch)
    blocks = {f"block_{i}": params for i, params in enumerate(plain.params["blocks"])}
    params = {"embed": plain.params["embedding"], **blocks, "head": plain.params["head"]}
    empty = {layer_id: {} for layer_id in stack.ids}

    @jax.jit
    def loss(params):
        logits, _ = stack.apply(stack.ids, params, empty, batch[0], key=None, microbatch=None, train=True)
        return gpt.summed_loss(logits, batch[1])

    total, weight = loss(params)
    assert float(total / weight) == pytest.approx(plain(), rel=1e-6)


def test_the_flops_of_a_sequence():
    assert TINY.sequence_flops == 8 * (6 * (12 * 2 * 16**2 + 16 * 256) + 12 * 2 * 8 * 16)


@pytest.mark.slow
def test_chunks_of_logits_need_less_memory():
    whole, parts = (cross_entropy.temporary((2, 64), 8, 500, "float32", chunk) for chunk in (None, 16))
    assert parts < whole / 2
    seconds = cross_entropy.timed(20, 1024)
    assert seconds() > 0


def test_transfers_are_those_of_the_runtime():
    assert callable(transfers.Connection.compile)


# Goals --------------------------------------------------------------------------------------------------------------------


def test_goals_are_those_of_the_schedules():
    goal = {entry.name: entry.goal(2) for entry in ENTRIES}
    assert goal["jpipe gpipe"] == goal["jpipe pipedream_flush"] == pytest.approx(0.97 * 2 / 3)
    for schedule in ("pipedream_flush", "pipedream", "pipedream_2bw"):
        assert goal[f"jpipe {schedule}+1"] == goal[f"jpipe {schedule}"]
    assert goal["jpipe pipedream"] == goal["jpipe pipedream_2bw"] == 0.97
    (dp,) = [entry for entry in ENTRIES if entry.name == "jpipe DP"]
    assert (dp.goal(8), dp.goal(2)) == (0.97, 0.92)
    assert goal["jpipe naive"] is None
    kinds = {re.split(r"[+/]", entry.kind)[0] for entry in ENTRIES if entry.module == "jpipe_pipeline"}
    assert kinds == {*jpipe.schedules.SCHEDULES, "dp"} - {"auto_zero_bubble"}, "all but the one that needs an order"


def test_goals_that_cannot_be_measured_are_left_out():
    shares = {"jpipe pipedream_2bw": 0.96, "torch 1F1B": 0.5, "torch GPipe": 0.6}
    result = {text: (least, ratio) for text, least, ratio in goals(2, shares)}
    assert result == {
        "jpipe pipedream_2bw ÷ ceiling": (0.97, 0.96),
        "jpipe pipedream_2bw ÷ torch 1F1B": (1.0, pytest.approx(1.92)),
        "jpipe pipedream_2bw ÷ torch's best pipeline": (1.6, pytest.approx(1.6)),
    }
    assert goals(8, {"jpipe DP": 1.0}) == [("jpipe DP ÷ ceiling", 0.97, 1.0)]


def test_goals_compared_with_other_schedules():
    shares = {
        "jpipe zb_h1": 0.75,
        "jpipe pipedream_flush": 0.6,
        "torch 1F1B": 0.5,
        "torch, one core": 0.4,
        "jpipe zb_v": 0.7,
        "torch ZBV": 0.6,
    }
    result = {text: (least, ratio) for text, least, ratio in goals(2, shares) if "zb" in text}
    assert result == {
        "jpipe zb_h1 ÷ jpipe pipedream_flush": (1.15, pytest.approx(1.25)),
        "jpipe zb_h1 ÷ ceiling": (pytest.approx(0.625), 0.75),
        "jpipe zb_v ÷ ceiling": (pytest.approx(0.75), 0.7),
    }
    assert "jpipe zb_h1 ÷ jpipe pipedream_flush" not in [text for text, *_ in goals(8, shares)]


def test_programs_of_one_run_share_a_port_and_the_jobs_of_the_ceiling_nothing():
    (first, second), python = next(e for e in ENTRIES if e.name == "torch GPipe").commands(8, "python"), "python"
    assert first[:5] == [python, "-m", "benchmarks.peers.torch_program", "gpipe", "8"]
    assert (first[5:7], second[5:7]) == (["0", "2"], ["1", "2"])
    assert first[7] == second[7]
    assert CEILING_ENTRY.commands(2, python) == [[python, "-m", "benchmarks.peers.jax_plain", "2"]] * 2


# Hosts --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9])
def test_at_its_rate_data_parallelism_communicates_for_that_share(share):
    seconds = 8 * 25e6 / hosts.rate_for(share, 0.3, 25e6)
    assert seconds / (seconds + 0.3) == pytest.approx(share)


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("count", [2, 4])
def test_plans_have_a_worker_on_each_host(name, count):
    stack, (inputs, _) = WORKLOADS[name].stack(), WORKLOADS[name].batch()
    assert 3e6 < gpt.count_parameters(stack, inputs[:1]) < 9e6
    for kind in kinds(WORKLOADS[name], count):
        plan = make_plan(WORKLOADS[name], kind, count)
        plan.check_layers(stack.ids)
        assert sum(stage.replicas for stage in plan.stages) == count


def test_sizes_are_those_of_the_weights_and_of_what_a_sample_passes_on():
    layers = sizes(WORKLOADS["VGG-like"])
    assert layers["conv_0"] == (4 * (3 * 3 * 3 * 32 + 32), 4 * 16 * 16 * 32)
    assert layers["dense_0"] == (4 * (4 * 4 * 64 * 2048 + 2048), 4 * 2048)
    assert hosts._shape("VGG-like", 4)["cuts"] == {"conv_1": 4 * 16 * 16 * 32, "conv_2": 4 * 8 * 8 * 64, "dense_1": 4 * 2048}


class Updates:
    """A program of one host whose updates take some seconds each; it remembers which updates each of its runs makes."""

    def __init__(self, warm_up, seconds):
        self.next, self.seconds, self.runs = warm_up, seconds, []

    def facts(self):
        return [{}]

    def run(self, steps):
        self.runs.append(range(self.next, self.next + steps))
        self.next += steps
        return [{"ends": [self.seconds * update for update in self.runs[-1]], "sent_bytes": 100.0, "waiting": 0.5}]


@pytest.mark.parametrize("seconds", [0.04, 1.0])
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.every > 1])
def test_each_measurement_has_whole_agreements(kind, seconds):
    plan, program = make_plan(WORKLOADS["GPT"], kind, 4), Updates(KINDS[kind].warm_up, seconds)
    for _ in range(12):
        assert hosts._run(program, "GPT", kind)["step_seconds"] == pytest.approx(seconds)
    for measured in program.runs[1::2]:
        begun = [update for update in measured[:-1] if agrees(plan, 0, update)]
        assert len(begun) == (len(measured) - 1) / KINDS[kind].every == (3 if seconds < 0.1 else 1)
        waited_for = [agreement_applied(plan, 0, update - 1) for update in measured[1:]]  # the time of the first update does not count
        assert [update for update in waited_for if update is not None] == begun


def test_some_plans_are_measured_again_and_the_others_stay(monkeypatch, tmp_path, capsys):
    old = [{"plan": name, "rate": 1e8, "labels_per_second": 1.0, "bytes_per_update": 1e3} for name in kinds(WORKLOADS["GPT"], 2)]
    runs = [{"workload": "GPT", "hosts": count, "rows": list(old), "profile": "old"} for count in (2, 4)]
    (tmp_path / "hosts.json").write_text(json.dumps({"runs": runs}))
    fake = SimpleNamespace(hosts=range(2), limit=lambda rate: None)
    monkeypatch.setattr(hosts, "Network", lambda count: contextlib.nullcontext(fake))
    monkeypatch.setattr(hosts, "_start", lambda network, name, kind: contextlib.nullcontext(Updates(KINDS[kind].warm_up, 0.5)))
    monkeypatch.setattr(hosts.signal, "signal", lambda *_: None)
    late = "replicas that agree every 50, 25 late"
    arguments = ["--hosts", "2", "--workloads", "GPT", "--plans", late, "--rates", "100", "--keep", "--json", str(tmp_path / "hosts.json")]
    monkeypatch.setattr(sys, "argv", ["benchmarks.hosts", *arguments])
    assert hosts.main() == 0
    assert f"{late}    100.0" in capsys.readouterr().out
    two, four = json.loads((tmp_path / "hosts.json").read_text())["runs"]
    assert four == runs[1]
    assert (two["profile"], list(dict.fromkeys(row["plan"] for row in two["rows"]))) == ("old", kinds(WORKLOADS["GPT"], 2))
    assert {row["plan"] for row in two["rows"] if row not in old} == {"data parallel", late}
    assert sum(row["plan"] == "data parallel" for row in two["rows"]) == 2  # without a limit and at the rate
    table = links.table([two])
    (shown,) = (row for row in table.rows if row[1] == late)
    assert shown == [2, late, "1,536", "0"]


def test_earlier_results_that_cannot_be_read_are_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "Network", None)
    monkeypatch.setattr(sys, "argv", ["benchmarks.hosts", "--keep", "--json", str(tmp_path / "none.json")])
    monkeypatch.setattr(hosts.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match=r"--keep: cannot read '.*none.json'.*measure without --keep"):
        hosts.main()


@pytest.mark.parametrize("rate", [1e9, 1e10, 1e11])
def test_a_late_agreement_takes_the_time_that_its_delay_does_not_hide(rate):
    cost = jpipe.programs.StageCost(forward=0.01, backward=0.02, weights=10**9, accumulators=10**9)
    computing, summing = 6 * 0.03, 8e9 / rate  # of an update; of an agreement between two hosts
    for kind, hidden in (("replicas that agree every 50", 0), ("replicas that agree every 50, 25 late", 25)):
        seconds = links.seconds_per_update(make_plan(WORKLOADS["GPT"], kind, 2), [cost], rate, 50)
        expected = (50 - hidden) * computing + max(hidden * computing, summing)
        assert 50 * seconds == pytest.approx(expected, abs=4 * links.LATENCY)


def test_missing_root_rights_are_reported(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(sys, "argv", ["benchmarks.hosts"])
    monkeypatch.setattr(hosts.signal, "signal", lambda *_: None)
    assert hosts.main() == 2
    assert "expected root, who may make network namespaces, found user 1000; run it with sudo" in capsys.readouterr().err


def test_a_missing_iproute2_is_reported(monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda name: None if name == "tc" else "/sbin/ip")
    with pytest.raises(network.NoNetwork, match="found no tc; install iproute2"):
        network.Network(2)


# Time to accuracy --------------------------------------------------------------------------------------------------------


def trained(kind, hosts, losses, seconds_each):
    curve = [{"samples": 640 * i, "seconds": seconds_each * i, "loss": loss} for i, loss in enumerate(losses)]
    last = curve[-1]
    numbers = {"predicted_samples_per_second": 100 / seconds_each, "bytes_per_sample": 5000.0, "link_busy": 0.5}
    return {
        **{"task": "GNMT-8", "hosts": hosts, "kind": kind, "plan": kind, "rate": 2e8, "target": 2.0, "curve": curve, "chosen": True},
        **{"reached": last["loss"] <= 2.0, "samples_per_second": last["samples"] / last["seconds"], **numbers},
    }


def test_the_table_compares_the_time_to_the_target():
    runs = [trained("data parallelism", 2, [6, 3, 2], 8.0), trained("pipeline", 2, [6, 3, 2.5, 1.9], 2.0)]
    runs += [trained("data parallelism", 4, [6, 3, 2], 8.0), trained("pipeline", 4, [6, 3, 2.5], 2.0) | {"chosen": False}]
    table = accuracy.table(runs)
    rows = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    assert [row["samples"] for row in rows] == ["1,280", "1,920", "1,280", "1,280"]
    assert [row["speed-up"] for row in rows] == ["", "2.67", "", "not reached"]
    assert [row["predicted"] for row in rows] == ["", "4.00", "", "4.00"]
    assert [row["plan"].endswith("(not chosen)") for row in rows] == [False, False, False, True]
    runs.append(runs[0] | {"task": "AWD-LM"})  # not yet measured on four hosts, nor as a pipeline
    (axes,) = accuracy_draw.draw(accuracy.table(runs)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["GNMT-8, 2 hosts", "GNMT-8, 4 hosts", "AWD-LM, 2 hosts"]
    assert [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) != 1] == [[16, 6], [16, 4]]
    assert [text.get_text() for text in axes.texts] == ["2.67 ×", "not reached"]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_trained_stage_may_have_replicas(name, tmp_path):
    config = tasks.load(tasks.TASKS[name], tmp_path)
    assert not tasks.model.layers(config).carries_rows
    assert config.train.batch_size % (4 * min(tasks.SIZES)) == 0, "data parallelism on four hosts needs a microbatch each"


def test_data_parallelism_is_compared_with_the_best_pipeline(monkeypatch, tmp_path):
    layers = [layer_profile(n, 1e-3, 10**7) for n in range(4)]
    layers = [layer | {"at": layer["at"] * len(tasks.SIZES)} for layer in layers]
    sizes = {"sizes": tasks.SIZES, "inputs": [10**4] * len(tasks.SIZES), "labels": [10] * len(tasks.SIZES)}
    (alone, plan), (pipeline, piped) = (
        (one, one[1].candidate.plan(tuple("abcd")))
        for one in accuracy._chosen("AWD-LM", tmp_path, Profile(source="measured", layers=layers, **sizes), 2)
    )
    assert (alone[0], plan.depth, plan.replicas, alone[2]) == ("data parallelism", 1, (2,), False)
    assert (pipeline[0], piped.depth, pipeline[2]) == ("pipeline", 2, True)
    assert accuracy.shown(plan) == f"2 replicas, {plan.microbatches} microbatches"
    assert f"1-1, cut before {piped.stages[1].layers[0]}; {piped.microbatches} microbatches" in accuracy.shown(piped)


@pytest.mark.exhaustive
def test_a_host_trains_and_validates_as_requested(quickly_compiled, monkeypatch, tmp_path):
    make.make("words", str(tmp_path / "words"), 0, lambda _: None)
    sent = itertools.count(0, 1000)
    monkeypatch.setattr(accuracy_program, "sent_bytes", lambda: next(sent))
    config = tasks.load(tasks.TASKS["AWD-LM"], tmp_path)
    stack = tasks.Parts.of(config, tasks._QUIET).stack
    trainer = accuracy_program.make_trainer("AWD-LM", tmp_path, jpipe.Plan.even(stack.ids, 2, "pipedream", 2))
    before, after, same = (trainer(steps) for steps in (0, 6, 0))
    assert after["val_loss"] < before["val_loss"]
    assert same["val_loss"] == after["val_loss"]
    assert [answer["sent_bytes"] for answer in (before, after)] == [1000, 1000]


def test_runs_that_are_not_repeated_stay_in_the_table(monkeypatch, tmp_path, capsys):
    runs = [trained(kind, hosts, [6, 3, 2], 8.0) for hosts in (2, 4) for kind in accuracy_draw.LOOKS]
    (tmp_path / "accuracy.json").write_text(json.dumps({"runs": runs}))
    (tmp_path / "page.md").write_text(f"<!-- {accuracy.PLACE} -->\n\n| old |\n")
    new = [trained(kind, 2, [6, 2], 3.0) for kind in accuracy_draw.LOOKS]
    monkeypatch.setattr(accuracy, "_measure", lambda options, folder, results: results["runs"].extend(new))
    monkeypatch.setattr(accuracy.signal, "signal", lambda *_: None)
    files = ["--json", str(tmp_path / "accuracy.json"), "--document", str(tmp_path / "page.md")]
    assert accuracy.main(["--tasks", "GNMT-8", "--hosts", "2", "--keep", *files]) == 0
    text = accuracy.table([*new, *runs[2:]]).text
    assert text in capsys.readouterr().out
    assert (tmp_path / "page.md").read_text() == f"<!-- {accuracy.PLACE} -->\n\n{text}\n"
    with pytest.raises(SystemExit, match="--keep: cannot read"):
        accuracy.main(["--keep", "--json", str(tmp_path / "none.json")])


def test_time_to_accuracy_needs_root(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(accuracy, "_profile", lambda *_: None)
    monkeypatch.setattr(accuracy.make, "make", lambda *_: None)
    monkeypatch.setattr(accuracy.signal, "signal", lambda *_: None)
    assert accuracy.main(["--json", str(tmp_path / "accuracy.json")]) == 2
    assert "bench-accuracy: expected root" in capsys.readouterr().err


# One GPU ------------------------------------------------------------------------------------------------------------------


def test_the_gpu_program_wants_a_gpu(capsys):
    assert gpu.main([]) == 2
    assert "expected a GPU" in capsys.readouterr().err


# Recipes ------------------------------------------------------------------------------------------------------------------


def small_model():
    return recipes.Model(
        jpipe.LayerStack(dict.fromkeys("ab", DENSE)),
        squares,
        optax.sgd(0.1, momentum=0.9),
        lambda m: (np.ones((2 * m, 4), np.float32),) * 2,
    )


@pytest.mark.exhaustive
def test_recipes_cost_no_wait_and_half_the_stash(quickly_compiled):
    rows = recipes.measure(small_model, stages=2, rounds=1, steps=1, schedules=("2BW",), depths=(2, 3))
    measured = {row["figure"].partition(" (of ")[0]: row["measured"] for row in rows}
    assert measured["2BW, 2 stages: step time, clip_global_norm / without"] > 0
    assert measured["PipeDream, 2 stages, m = 1: weight versions, bfloat16 / float32"] == 0.5
    assert measured["2BW, 2 to 3 stages: computations that the norm delays"] == 0
    assert measured["vertical sync, 2 to 3 stages: computations that the norm delays"] == 0


# Papers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_row_of_table_1_is_planned_and_put_into_the_documents(real, monkeypatch, quickly_compiled, tmp_path, capsys):
    if not real:  # which takes some seconds
        layers = [layer_profile(n, forward, size) for n, (forward, size) in enumerate(((8e-3, 10**6), (2e-3, 10**8), (2e-3, 10**9)))]
        profile = Profile(source="analytic", sizes=[80], inputs=[10**6], labels=[10], layers=layers)
        monkeypatch.setattr(papers.pipedream, "pipedream_profile", lambda _: profile)
    first, second = tmp_path / "first.md", tmp_path / "second.md"
    first.write_text("before\n\n<!-- table 1 -->\n\n| old |\n\nafter\n")
    second.write_text("<!-- table 1, sums -->\n")
    options = ["--documents", str(first), str(second), "--pictures", str(tmp_path), "--json", str(tmp_path / "papers.json")]
    papers.main(["table-1", "--model", "S2VT", *options])
    table, sums = json.loads((tmp_path / "papers.json").read_text())["table-1"]
    ((model, cluster, paper, planned, as_paper, *_),) = table["rows"]
    assert (model, cluster, paper) == ("S2VT", "4 × 1 C", "2-1-1 (3.01)")
    faster, of_paper = (float(re.search(r"\((.+)\)", cell)[1]) for cell in (planned, as_paper))
    assert as_paper.startswith("2-1-1 ")
    assert faster >= of_paper > (0 if real else 1)
    text, below = (papers.Table(**one).text for one in (table, sums))
    assert first.read_text() == f"before\n\n<!-- table 1 -->\n\n{text}\nafter\n"
    assert second.read_text() == f"<!-- table 1, sums -->\n\n{below}\n"
    assert text in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("*.svg")] == ["papers-plans.svg"]


def test_a_document_without_markers_for_a_table_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        papers.main(["table-1", "--documents", str(tmp_path / "none.md")])
    assert "expected a document, found no file" in capsys.readouterr().err
    with pytest.raises(jpipe.InputError, match="expected a line '<!-- table 1 -->'"):
        put("| old |\n", {"table 1": "| new |\n"})


def test_pictures_show_the_numbers_of_the_tables():
    assert draw.numbers("2-1-1 (3.01)") == [2, 1, 1, 3.01]
    assert draw.numbers("-72%") == [-72]
    assert draw.numbers("0% to 26%") == [0, 26]
    assert draw.numbers("85% less; 95% less (preprint)") == [85, 95]
    assert draw.numbers("1,736 samples/s") == [1736]
    assert draw.numbers("") == []
    figure = Figure()
    rows = [("VGG-16", "1.0 GB", "4.0 GB", "3.0 GB", "2.0 GB", "2.5 GB", "1.60", "on par")]
    flights = [(n, f"{100 * n} samples/s", "1.0 GB", "2.0 GB", "3.0 GB", "4.0 GB") for n in (1, 2)]
    tables = {name: papers.Table(name, (), table_rows) for name, table_rows in (("figure 16", rows), ("figure 18", flights))}
    draw.PICTURES["memory"].draw(figure, tables)
    left, middle, right = figure.axes
    assert [bar.get_height() for bar in left.patches] == [1, 4, 3, 2]
    assert list(left.lines[0].get_ydata()) == [2.5, 2.5]
    assert sorted(bar.get_height() for bar in middle.patches) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [bar.get_height() for bar in right.patches] == [100, 200]


@pytest.mark.parametrize("name", draw.PICTURES)
def test_each_picture_of_the_papers_pages_exists_with_its_tables(name):
    docs = pathlib.Path(__file__).parents[1] / "docs"
    pages = [path.read_text(encoding="utf-8") for path in (docs / "explanation").glob("papers-*.md")]
    (page,) = [page for page in pages if f"](../pictures/papers-{name}.svg)" in page]
    assert (docs / f"pictures/papers-{name}.svg").stat().st_size < 150_000
    assert all(f"<!-- {table} -->" in page for table in draw.PICTURES[name].tables)


def layer_profile(n, forward, size):
    at = [{"forward": forward, "backward": 2 * forward, "outputs": 10**6, "residuals": {"none": 10**6}}]
    return {"id": f"layer {n}", "weights": size, "optimizer": size, "at": at}


def placements(replicas, count):
    """Yield all cuts of `count` layers into stages with these replicas."""
    firsts = (0, *itertools.accumulate(replicas))
    for cuts in itertools.combinations(range(1, count), len(replicas) - 1):
        pieces = itertools.pairwise((0, *cuts, count))
        yield [Placed(*piece, first, replica_count) for piece, first, replica_count in zip(pieces, firsts, replicas, strict=False)]


def different_layers():
    """Return six layers on four devices, whose links carry a byte per second."""
    random = np.random.default_rng(0)
    costs = [
        jpipe.programs.LayerCost(time, 2 * time, outputs=int(out), weights=int(size), update=0.1)
        for time, out, size in zip(random.uniform(1, 5, 6), random.uniform(1, 9, 6), random.uniform(1, 40, 6), strict=True)
    ]
    return costs, Problem(costs, Topology.flat(4, 1.0))


def test_the_cuts_for_given_replicas_are_the_fastest_where_sums_wait():
    """For a stage of r replicas the sum of its gradients follows its computation."""
    costs, problem = different_layers()

    def seconds(placed, slower):
        longest = float(max(costs[one.stop - 1].outputs for one in placed[:-1])) if placed[1:] else 0.0
        for start, stop, _, r, _ in placed:
            computes = sum(cost.forward + cost.backward + cost.update for cost in costs[start:stop])
            sums = slower * 2 * (r - 1) / r * sum(cost.weights for cost in costs[start:stop])
            longest = max(longest, (computes + sums) / r)
        return longest

    differ = 0
    for slower, replicas in itertools.product((0.5, 2.0), stages.configurations(4)):
        least = min(seconds(placed, slower) for placed in placements(replicas, 6))
        found = stages.best_cuts(problem, replicas, stages.waiting(slower))
        assert seconds(found.stages, slower) == pytest.approx(least)
        assert stages.waiting_speed_up(problem, replicas, slower) == pytest.approx(seconds([Placed(0, 6, 0, 4)], slower) / least)
        differ += found.stages != stages.best_cuts(problem, replicas).stages
    assert differ > 2, "with overlapping sums other cuts are the fastest"


def test_the_cuts_for_given_replicas_are_the_fastest():
    costs, problem = different_layers()
    for replicas in stages.configurations(4):
        every = [evaluate_partition(problem, placed) for placed in placements(replicas, 6)]
        assert stages.best_cuts(problem, replicas).seconds == min(one.seconds for one in every)
    assert stages.best_pipeline(problem).seconds == min(stages.best_cuts(problem, one).seconds for one in stages.configurations(4))
    sent = [
        stages.bytes_per_sample(problem, evaluate_partition(problem, placed), 1)
        for replicas in stages.configurations(4)
        for placed in placements(replicas, 6)
    ]
    assert stages.bytes_per_sample(problem, stages.least_bytes(problem), 1) == pytest.approx(min(sent))
    assert stages.best_cuts(Problem(costs[:2], Topology.flat(4, 1.0)), (2, 1, 1)) is None
    only = [stages.bytes_per_sample(problem, evaluate_partition(problem, placed), 1) for placed in placements((2, 1, 1), 6)]
    assert stages.bytes_per_sample(problem, stages.least_bytes(problem, (2, 1, 1)), 1) == pytest.approx(min(only))


def test_sums_that_wait_make_data_parallelism_slower():
    costs = [jpipe.programs.LayerCost(1.0, 2.0, weights=size, accumulators=size) for size in (0, 0, 0, 4)]
    problem = Problem(costs, Topology.flat(4, 1.0))
    summed = 2 * 3 / 4 * 4  # seconds of a ring of four
    assert stages.waiting_speed_up(problem, (1, 1, 1, 1)) == pytest.approx((12 + summed) / 4 / 3)
    assert stages.waiting_speed_up(problem, (3, 1)) == pytest.approx((12 + summed) / 4 / 3)  # the replicas have no weights
    assert stages.slowness(problem, (1, 1, 1, 1), 4.0) == pytest.approx((4 * 12 - 12) / summed, rel=1e-4)
    assert stages.slowness(problem, (2, 2), 100.0) is None  # which waits for the sum, too


def test_collectives_of_a_compiled_program_are_asynchronous_or_not():
    """A pair with two computations between start and done, a wrapped one with none, and one that is synchronous."""
    from benchmarks.targets import Found, collectives, in_words

    text = """HloModule jit_f, is_scheduled=true

%inside (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %reduce.1 = f32[2]{0} reduce-scatter(%p), channel_id=1
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %all-reduce-start = f32[8]{0} all-reduce-start(%x), channel_id=2, to_apply=%add
  %fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %dot.1 = f32[8]{0} dot(%fusion.1, %x)
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %start = ((f32[8]{0}), f32[2]{0}) async-start(%x), calls=%inside
  %done = f32[2]{0} async-done(%start)
  ROOT %gather = f32[8]{0} all-gather(%done), channel_id=3
}
"""
    each = list(collectives(text))
    assert each == [Found("all-reduce", 2), Found("reduce-scatter", 0), Found("all-gather", None)]
    assert in_words(each) == "1 synchronous; 2 asynchronous (0 to 2)"
    assert in_words(each[:1]) == "1 asynchronous (2)"
