"""`jpipe target` lists and describes targets, writes the attached one and shows rooflines; `jpipe simulate --target` compiles for one."""

import json
import re
from pathlib import Path

import jax
import pytest
import yaml

import jpipe
import jpipe_train.plan.target
from jpipe_planner import Device, Profile
from jpipe_planner.cost.rooflines import ProgramRoofline, Rooflines
from jpipe_planner.machine.attached import Attached
from jpipe_planner.machine.roofline import Kernel
from jpipe_planner.machine.targets import find_target, known_targets
from jpipe_train import cli
from jpipe_train.plan import longest_rows
from jpipe_train.plan import roofline as rooflines

ROOT = Path(__file__).parents[3]
TOPOLOGIES = ROOT / "configs" / "topologies"


@pytest.fixture
def printed(capsys, monkeypatch):
    """Run a command, and return what it prints and its exit code."""
    monkeypatch.setenv("COLUMNS", "1000")

    def printed(*words: str) -> tuple[str, str, int]:
        code = cli.main(list(words))
        result = capsys.readouterr()
        return result.out, result.err, code

    return printed


@pytest.fixture
def of_this_machine(tmp_path) -> str:
    """Write a target of which this machine has devices, and return the file."""
    compiler = {"topology": "v5e:2x4"}
    fields = {"platform": "tpu", "name": jax.local_devices()[0].device_kind, "memory": "2 MB", "reserved": {"something": "1 MB"}}
    fields |= {"flops": {"float32": "1 TFLOP/s"}, "memory_bandwidth": "1 GB/s", "compiler": compiler}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"format": "jpipe-targets/1", "targets": {"mine": fields}}))
    return str(path)


def test_the_table_has_a_row_for_each_target_and_says_what_to_install(printed, monkeypatch):
    monkeypatch.setattr(jpipe_train.plan.target, "target_refusal", lambda target: None if target.platform == "tpu" else "install it")
    out, err, code = printed("target")
    assert (err, code) == ("", 0)
    rows = {line.split()[0]: line for line in out.splitlines()[1 : 1 + len(known_targets())]}
    assert list(rows) == list(known_targets())
    assert rows["h100-80gb"].endswith("  no")
    assert rows["v5e"].endswith("  yes")
    assert all(words in rows["h100-80gb"] for words in ("NVIDIA H100 80GB HBM3", "80.0 GB", " 67 ", " 989 ", "3,352 GB/s"))
    assert "no compiler here: h100-80gb, " in out
    assert out.endswith(": install it\n")


def test_one_target_is_shown_with_its_sources(printed, of_this_machine):
    out, err, code = printed("target", "v100-16gb")
    target = find_target("v100-16gb")
    assert (err, code) == ("", 0)
    assert out.startswith("v100-16gb: Tesla V100-SXM2-16GB (cuda)\nmemory: 16.0 GB; a plan may use 14.9 GB\nreserved: CUDA context")
    assert all(f"\n  {source}\n" in out for source in target.sources)
    assert "\ncompiled here: " in out
    out, err, code = printed("target", of_this_machine)
    assert "\ncompiled here: yes\n" in out
    assert out.endswith("sources: none\n")


def test_the_attached_device_is_written_once(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attached = Attached("text\n", "h100-80gb", "NVIDIA H100 80GB HBM3", "h100-80gb", ("core_count 114 (table: 132)",))
    monkeypatch.setattr(jpipe_train.plan.target, "attached_target", lambda: attached)
    out, err, code = printed("target", "--here")
    assert (err, code) == ("", 0)
    assert out.startswith(
        "written: h100-80gb.yaml, NVIDIA H100 80GB HBM3; its FLOP/s, efficiency and reserved bytes are taken from h100-80gb "
    )
    assert "\nit differs from the table: core_count 114 (table: 132)\n" in out
    assert (tmp_path / "h100-80gb.yaml").read_text() == "text\n"
    assert printed("target", "--here") == (
        "",
        "jpipe: --out: 'h100-80gb.yaml' already exists; choose another name, or remove it first\n",
        2,
    )
    monkeypatch.setattr(jpipe_train.plan.target, "attached_target", lambda: Attached("text\n", "b1", "B1", ""))
    assert "the table has no B1: add its peak FLOP/s to 'flops' in the file" in printed("target", "--here", "--out", "mine.yaml")[0]
    assert sorted(path.name for path in tmp_path.glob("*.yaml")) == ["h100-80gb.yaml", "mine.yaml"]


@pytest.mark.slow
def test_the_longest_rows_fit_and_twice_as_long_ones_do_not(printed, of_this_machine, config, monkeypatch):
    """The target has 1 MB for a plan."""
    monkeypatch.setattr(longest_rows, "LENGTHS", (32, 64))
    monkeypatch.setattr(longest_rows, "STEP", 8)
    monkeypatch.setattr(longest_rows, "SLICES", (None, 4))
    monkeypatch.setattr(longest_rows, "POLICIES", ("full",))
    words = "--set", "plan.schedule=pipedream_flush", "--set", "model.max_positions=4096"
    out, err, code = printed("target", of_this_machine, "--longest-rows", config, *words)
    assert (err, code) == ("", 0)
    rows = {line.split()[0]: [int(word.replace(",", "")) for word in line.split()[1:]] for line in out.splitlines()[2:4]}
    assert list(rows) == ["1", "4"]
    assert rows["4"][0] > rows["1"][0] > 0
    tokens, slices, policy = re.search(r"compiled: ([\d,]+) tokens in (\d) slices with recompute (\w+) need", out).groups()
    for times, fits in ((1, True), (2, False)):
        changes = f"model.seq_len={times * int(tokens.replace(',', ''))}", f"plan.slices={slices}", f"plan.recompute={policy}"
        simulated = printed(
            "simulate", config, "--target", of_this_machine, *words, *(word for change in changes for word in ("--set", change))
        )
        assert ("every rank fits" in simulated[0]) == fits


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (("plan.schedule=naive",), "one of the schedules with an order for slices, gpipe, "),
        (("plan.schedule=gpipe",), "a model that can be cut, found one of rows"),
        pytest.param(("plan.schedule=gpipe", "model.experts={count: 2, per_token: 1, mlp_width: 8}"), "", marks=pytest.mark.slow),
    ],
)
def test_rows_are_whole_where_slices_are_impossible(changes, why, printed, of_this_machine, config, monkeypatch):
    """Without experts the profiles are stubs."""

    def stub(*_, in_slices, **__):
        if in_slices:
            raise jpipe.InputError(where="plan", key="slices", expected="a model that can be cut", found="one of rows", change="do not")
        return Profile.model_construct()

    monkeypatch.setattr(longest_rows, "LENGTHS", (8, 16))
    monkeypatch.setattr(longest_rows, "POLICIES", ("full",))
    if why:
        monkeypatch.setattr(longest_rows, "analyze", stub)
        monkeypatch.setattr(longest_rows, "cell_of", lambda plan, *_: longest_rows.Cell(plan, (), 0))
    else:
        monkeypatch.setattr(longest_rows, "COMPILED", 0)
    changes = *changes, "model.max_positions=32"
    out, err, code = printed("target", of_this_machine, "--longest-rows", config, *(word for each in changes for word in ("--set", each)))
    assert (err, code) == ("", 0)
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["slices", "1"]
    assert not why or "below 8" in out.splitlines()[2]
    assert f"whole rows only, because slices need {why}" in out
    with pytest.raises(jpipe.InputError, match="slices"):
        longest_rows.main(of_this_machine, config, (*changes, "plan.slices=2"))


def test_rows_below_the_shortest_of_a_profile_have_no_number():
    shortest, longer = ((length,) for length in longest_rows.LENGTHS)
    found = [longest_rows.longest((shortest, longer), shortest[0] + more) for more in (longest_rows.STEP, 0, -1)]
    assert found == [shortest[0] + longest_rows.STEP, shortest[0], 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "target h100",
            "target: unknown target 'h100'; did you mean 'h100-80gb' or 'h100-pcie'? (the name of your own file must end in .yaml)",
        ),
        ("target none.yaml", "target: cannot read 'none.yaml': No such file or directory; name a file that is there"),
        (
            "target --here",
            "target --here: expected an NVIDIA GPU or a TPU, found cpu; run it where JAX has one, with jpipe-train[cuda13] or ",
        ),
        ("target v5e --here", "target: expected a name or --here, found both 'v5e' and --here; remove one of them"),
        ("target --out a.yaml", "target: --out has no effect without --here; did you mean jpipe target --here?"),
        (
            "target --roofline tiny.yaml",
            "target: --roofline needs the name of a target; did you mean jpipe target h100-80gb --roofline CONFIG?",
        ),
        ("target v5e --json", "target: --json has no effect without --roofline; add --roofline CONFIG"),
        ("target v5e --set train.steps=1", "target: --set and --allow-code have no effect without --roofline or --longest-rows; add one"),
        ("target v5 --roofline tiny.yaml", "target: unknown target 'v5'; did you mean 'v5e' or 'v5p'? (the name of your own file must end"),
        ("target v5e --roofline none.yaml", "none.yaml: cannot read"),
        (
            "target v5e --roofline tiny.yaml --set plan.file=auto",
            "plan.file: a roofline is of one plan, found auto; name a plan's file, or null for the keys of 'plan'",
        ),
        ("target --here --out a.json", "--out: expected a name that ends in .yaml, found 'a.json'"),
        ("simulate tiny.yaml --target v5", "target: unknown target 'v5'; did you mean 'v5e' or 'v5p'? (the name of your own file must"),
        (
            "simulate tiny.yaml --target none.yaml",
            "--target: cannot read 'none.yaml': No such file or directory; name a file that is there",
        ),
        ("simulate tiny.yaml --target tiny.yaml", "tiny.yaml: expected YAML with 'format: jpipe-targets/1', found None; is this a file of"),
        ("simulate tiny.yaml --target v5e --no-compile", "--target: stages are compiled for it; leave out --no-compile"),
        (
            "simulate plan.json --target v5e",
            "--target: a plan alone does not know the model: expected a config, found the plan 'plan.json'",
        ),
    ],
)
def test_mistakes_are_one_line(words, message, printed, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(jpipe.Plan.even("abc", 3, "gpipe", 3).to_json())
    out, err, code = printed(*words.split())
    assert (out, code) == ("", 2)
    assert err.startswith(f"jpipe: {message}")
    assert err.count("\n") == 1


def test_a_roofline_needs_a_compiler_for_the_target(printed, config, tmp_path, monkeypatch):
    monkeypatch.setattr("jpipe_planner.machine.targets.target_refusal", lambda target: "it is missing; install it")
    assert printed("target", "h100-80gb", "--roofline", config) == ("", "jpipe: target: it is missing; install it\n", 2)
    topology = tmp_path / "topology.yaml"
    topology.write_text("format: jpipe-topology/1\nlevels: [{count: 2, bandwidth: 1 GB/s}]\ndevice: {memory: 1 GB}\n")
    message = "target: the topology's device has no target; add one that `jpipe target` lists"
    assert printed("target", str(topology), "--roofline", config) == ("", f"jpipe: {message}\n", 2)


def test_a_roofline_of_a_config_has_all_programs_and_the_jitted_step(printed, config, of_this_machine):
    out, err, code = printed("target", of_this_machine, "--roofline", config, "--json", "--set", "plan.schedule=gpipe")
    assert (err, code) == ("", 0)
    facts = json.loads(out)
    calls = {(one["stage"], one["op"]): one["calls"] for one in facts["programs"]}
    assert calls == {(s, op): number for s in (0, 1) for op, number in {"forward": 2, "backward": 2, "in_place": 1}.items()}
    step = facts["whole"]["kernels"]
    assert {kernel["kind"] for kernel in step} >= {"product", "fusion"}
    flops = [sum(kernel["flops"] * kernel["runs"] for kernel in one["kernels"]) for one in (*facts["programs"], facts["whole"])]
    assert flops[-1] == pytest.approx(sum(flop * one["calls"] for flop, one in zip(flops, facts["programs"], strict=False)))
    assert any("models/transformer.py:" in kernel["source"] for kernel in step)
    assert facts["share"] > 0


def test_a_roofline_is_shown_as_tables():
    kernel = Kernel("dot.1", "product", 1e6, 2e12, 0.004, 3, "/app/models/mine.py:7", "jit(forward)/dot_general")
    program, whole = ProgramRoofline(1, "forward", 2, (kernel,)), ProgramRoofline(None, "train_step", 1, (kernel,))
    device = Device(target="h100-80gb", name="H100")
    assert rooflines.lines(Rooflines((program,), whole), device) == [
        "stage  op          calls  kernels  bytes   TFLOP   ms",
        "1      forward     2      3        6.0 MB  12.000  24.000",
        "all                                6.0 MB  12.000  24.000",
        "       train_step  1      3        3.0 MB  6.000   12.000",
        "",
        "of the jitted step's throughput: 0.500",
        "predicted, not measured: H100, 3.4 TB/s, 0.45 of the peak FLOP/s in products, and 2 µs for each kernel; train_step: the same step "
        "jitted as one program",
        "calls per batch, with their total bytes, TFLOP and ms; kernels per call",
        "",
        "the 1 most expensive kernel of the stages, with equal kernels combined:",
        "op       kernel   runs  bytes   TFLOP   ms      line              name in JAX",
        "forward  product  6     6.0 MB  12.000  24.000  models/mine.py:7  jit(forward)/dot_general",
        "",
        "the 1 most expensive kernel of the jitted step, with equal kernels combined:",
        "op          kernel   runs  bytes   TFLOP  ms      line              name in JAX",
        "train_step  product  3     3.0 MB  6.000  12.000  models/mine.py:7  jit(forward)/dot_general",
    ]
    assert "no jitted step: too large" in rooflines.lines(Rooflines((program,), None, "too large"), device)


def test_the_page_names_all_targets():
    page = (ROOT / "docs" / "how-to" / "targets.md").read_text()
    section = page.partition("## The targets that ship\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([\w-]+)`", section)) == {*known_targets()}


@pytest.mark.exhaustive
def test_a_simulation_says_what_it_compiled_for_and_whether_the_ranks_fit(printed, config, of_this_machine):
    out, err, code = printed("simulate", config, "--target", of_this_machine)
    assert (err, code) == ("", 0)
    kind = jax.local_devices()[0].device_kind
    assert f", and the temporaries of its largest program, compiled for {kind}\n" in out
    assert out.endswith(f"a plan may use 1.0 MB of the 2.0 MB of {kind}: every rank fits\n")
    wide = printed("simulate", config, "--target", of_this_machine, "--set", "model.width=128", "--set", "model.heads=2")[0]
    assert f"of {kind}: rank " in wide
    assert wide.endswith(" more\n")


def test_without_a_compiler_the_cpus_memory_is_shown_with_its_error(printed, config, monkeypatch):
    monkeypatch.setattr("jpipe_planner.machine.targets.target_refusal", lambda target: "it is missing; install it")
    out, err, code = printed("simulate", config, "--target", str(TOPOLOGIES / "dgx-h100-2.yaml"))
    assert (err, code) == ("", 0)
    assert (
        "largest program, compiled for this machine (cpu), because it is missing; install it; the scratch memory of other devices may "
        "differ (docs/explanation/planner-accuracy.md)\n"
    ) in out
    assert "of NVIDIA H100 80GB HBM3: every rank fits\n" in out
    plain = printed("simulate", config)[0]
    assert "largest program, as compiled for this machine\n" in plain


@pytest.mark.exhaustive
def test_a_mesh_has_the_targets_devices(printed, config, of_this_machine, monkeypatch):
    mesh = ["--set", "plan.mesh={data: 2}", "--set", "plan.schedule=gpipe"]
    assert "compiled for" in printed("simulate", config, "--target", of_this_machine, *mesh)[0]
    monkeypatch.setattr("jpipe_planner.machine.compiling.target_devices", lambda target, count: tuple(jax.local_devices()[:1]))
    assert "need 2 devices to compile for, as in the largest mesh" in printed("simulate", config, "--target", of_this_machine, *mesh)[0]


def test_stages_that_xla_cannot_compile_are_one_line(printed, config, of_this_machine, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory\nmore lines")

    monkeypatch.setattr(jpipe.Pipeline, "costs", fail)
    kind = jax.local_devices()[0].device_kind
    message = f"XLA cannot compile the stages for {kind}: RESOURCE_EXHAUSTED: Ran out of memory; try smaller stages or microbatches"
    assert printed("simulate", config, "--target", of_this_machine) == ("", f"jpipe: {message}\n", 2)
