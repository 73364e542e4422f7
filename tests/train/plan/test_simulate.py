"""`jpipe simulate` agrees with the library and with sizes counted by hand; mistakes give one message and exit code 2."""

import re
from pathlib import Path

import jax
import pytest

import jpipe
from jpipe_planner import Device
from jpipe_train import cli
from jpipe_train.plan.simulate import host_words, with_agreements


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def plan_file(tmp_path):
    """Write a plan and give its path."""

    def write(schedule: str = "gpipe", num_stages: int = 4, microbatches: int = 4, name: str = "plan.json", **fields) -> str:
        plan = jpipe.Plan.even([f"layer_{i}" for i in range(9)], num_stages, schedule, microbatches, **fields)
        (tmp_path / name).write_text(plan.to_json())
        return str(tmp_path / name)

    return write


@pytest.fixture
def simulated(capsys, monkeypatch):
    """Run `jpipe simulate`, which must succeed without running the model or keeping an array; gives what it prints."""

    def device_work(*_):
        raise AssertionError("device work began")

    for method in ("init", "step", "drain", "evaluate"):
        monkeypatch.setattr(jpipe.Pipeline, method, device_work)

    def simulated(*arguments: str) -> str:
        arrays = jax.live_arrays()
        assert cli.main(["simulate", *arguments]) == 0
        assert {id(array) for array in jax.live_arrays()} <= {id(array) for array in arrays}
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return simulated


def table(printed: str) -> dict[str, list[str]]:
    """Return the columns of a printed table by their heads; two or more spaces separate cells."""
    lines = printed.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("rank  "))
    head, *rows = [re.split(r"\s{2,}", line) for line in lines[first : lines.index("", first)]]
    return {name: list(column) for name, column in zip(head, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("name", ["plan.json", "a-plan-by-another-name.txt"])
def test_a_plan_is_shown_in_units_of_a_forward_and_without_sizes(simulated, plan_file, name):
    path = plan_file("gpipe", name=name)
    printed = simulated(path)
    prediction = jpipe.simulate(jpipe.lower(jpipe.Plan.from_json(Path(path).read_text()), 3))
    assert prediction.grid() in printed
    assert "gpipe: 4 stages, 4 microbatches per batch, 3 batches\ntimes in units of one forward" in printed
    # A batch takes m + d - 1 = 7 slots of 3, of which 4 are busy.
    assert "bubble: 42.9% as shown, 42.9% in steady state, with a batch in 21 units" in printed
    assert "sizes and memory need a config" in printed
    assert table(printed) == {
        "rank": ["0", "1", "2", "3"],
        "layers": ["layer_0 layer_1 layer_2", "layer_3 layer_4", "layer_5 layer_6", "layer_7 layer_8"],
        "recompute": ["auto"] * 4,
        "in flight": ["4"] * 4,
        "versions": ["1"] * 4,
    }


def test_versions_and_in_flight_are_those_of_the_schedule_and_the_steady_state_has_no_bubble(simulated, plan_file):
    printed = simulated(plan_file("pipedream", microbatches=1), "--batches", "2")
    assert "4 stages, 1 microbatch per batch, 2 batches" in printed
    assert table(printed)["versions"] == ["4", "3", "2", "1"]  # more than two batches can show
    assert table(printed)["in flight"] == ["4", "3", "2", "1"]
    assert table(printed)["delay"] == ["3", "2", "1", "0"]
    assert "\npipedream: gradients are computed with weights that are 1.5 updates old on average: 3 at stage 0, " in printed
    assert "shown, 0.0% in steady state, with a batch in 3 units" in printed
    assert "B1.0*" in printed
    assert "B2." not in printed


def test_every_replica_has_its_row(simulated, plan_file):
    printed = simulated(plan_file("pipedream", num_stages=2, replicas=(2, 1)))
    assert "pipedream: 2 stages, 3 ranks, 4 microbatches per batch" in printed
    assert "steady state, with a batch in 12 units" in printed  # the last stage has 4 microbatches, each replica of the first one 2
    columns = table(printed)
    assert columns["rank"] == ["0", "1", "2"]
    assert columns["stage·replica"] == ["0·0", "0·1", "1·0"]
    assert columns["layers"] == ["layer_0 … layer_4 (5)"] * 2 + ["layer_5 … layer_8 (4)"]


def test_the_replicas_of_a_config_are_simulated_with_their_sizes(simulated, config):
    paper = ("plan.schedule=pipedream", "plan.replicas=[2, 1]", "plan.update_every=replicas")
    printed = simulated(config, *(word for key in paper for word in ("--set", key)))
    columns = table(printed)
    assert columns["layers"] == ["embed block_0", "embed block_0", "head"]
    assert columns["sends a batch"][0] == columns["sends a batch"][1] != columns["sends a batch"][2]
    for held_bytes, temporary, peak in zip(columns["held"], columns["temporary"], columns["peak memory"], strict=True):
        assert float(held_bytes.split()[0]) > 1
        assert float(temporary.split()[0]) > 0
        assert float(peak.split()[0]) > 1


def test_every_stage_of_a_rank_has_its_row(simulated, plan_file):
    printed = simulated(plan_file("interleaved_zero_bubble", chunks_per_rank=2))
    assert "interleaved_zero_bubble: 4 stages, 2 ranks, 4 microbatches per batch" in printed
    assert "a backward takes 2, each of its halves 1\n" in printed
    assert "rank 1 |" in printed
    assert "rank 2 |" not in printed
    lines = printed.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("rank  "))
    assert [line.split()[:2] for line in lines[first + 1 : first + 5]] == [["0", "0"], ["2", "layer_5"], ["1", "1"], ["3", "layer_7"]]


@pytest.mark.slow
def test_meshes_are_printed_with_their_devices_and_the_memory_of_each(simulated, config):
    keys = [word for key in ("plan.mesh={data: 2, model: 2}", "plan.replicas=[2, 1]", "plan.schedule=gpipe") for word in ("--set", key)]
    printed = simulated(config, *keys)
    assert "2 stages, 3 ranks, (data 2, model 2), 12 devices, 2 microbatches per batch" in printed
    assert "sends a batch  held, each device  temporary  peak memory\n" in printed


def test_chunks_of_a_config_are_simulated_with_the_memory_of_their_rank(simulated, config):
    keys = ("plan.schedule=zb_v", "plan.num_stages=2")
    printed = simulated(config, *(word for key in keys for word in ("--set", key)))
    assert "zb_v: 2 stages, 1 rank, " in printed
    lines = printed.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("rank  "))
    assert lines[first].endswith("peak memory")
    assert lines[first + 1].endswith("B")
    assert lines[first + 2].endswith(" 1")


def test_recomputation_is_reported_and_counted(simulated, plan_file):
    printed = simulated(plan_file("pipedream_2bw", recompute=["full", "none", "none", "none"]))
    assert "a backward takes 2; one that recomputes 3" in printed
    assert "with a batch in 16 units" in printed  # the slowest stage: four times 1 + 3
    assert table(printed)["recompute"] == ["full", "none", "none", "none"]


def test_many_layers_are_named_by_the_first_and_the_last(simulated, plan_file):
    printed = simulated(plan_file(num_stages=1), "--batches", "1")
    assert "gpipe: 1 stage, 4 microbatches per batch, 1 batch\n" in printed
    assert "bubble: 0.0% as shown, 0.0% in steady state" in printed
    assert table(printed)["layers"] == ["layer_0 … layer_8 (9)"]


def test_a_config_is_shown_with_exact_sizes_and_no_run_is_made(simulated, config, tiny):
    printed = simulated(config)
    columns = table(printed)
    assert "pipedream_2bw: 2 stages, 2 microbatches per batch, 3 batches" in printed
    assert columns["layers"] == ["embed block_0", "head"]
    assert columns["versions"] == ["2", "2"]
    # Between the stages flow 4 sequences of 8 vectors of 8 float32 a batch: 1024 bytes, and as many back.
    assert columns["sends a batch"] == ["1.0 kB", "1.0 kB"]
    # At most: two versions, two moments and a count for each layer, sums, what is in flight. The head's weights: a norm and 8 × 256.
    weights = 4 * (2 * 8 + 8 * 256)
    persistent, temporary, peak = (float(columns[name][1].removesuffix(" kB")) for name in ("held", "temporary", "peak memory"))
    assert 5 * weights < 1000 * persistent < 6 * weights
    assert temporary > 0.1
    assert peak == pytest.approx(persistent + temporary, abs=0.2)
    assert "\npeak memory: what a rank holds between its computations, and the temporaries of its largest program" in printed
    assert not Path(tiny["run"]["dir"]).exists()


def test_an_uncompiled_plan_shows_no_peak_memory(simulated, config):
    printed = simulated(config, "--no-compile")
    assert table(printed)["held"] == table(simulated(config))["held"]
    assert "temporary" not in table(printed)
    assert "peak memory" not in table(printed)
    assert (
        "\nheld: what a rank holds between its computations; the temporaries of its programs, and so the peak memory, need comp" in printed
    )


def test_the_lengths_of_slices_are_shown(simulated, config):
    printed = simulated(config, "--no-compile", "--set", "plan.slices={count: 2, by: cost}", "--set", "plan.schedule=gpipe")
    first, second = map(int, re.search(r"\nrows of 8 positions in slices of (\d) \+ (\d)\n", printed).groups())
    assert first + second == 8


def test_what_waits_in_host_memory_is_shown(simulated, config):
    printed = simulated(config, "--no-compile", "--set", "plan.offload={optimizer: all}")
    columns, head = table(printed), 4 * 2 * (8 + 8 * 256)  # two moments of its norm and its weights
    assert all(float(words.removesuffix(" kB")) > 0 for words in columns["in host memory"])
    assert head < 1000 * float(columns["in host memory"][1].removesuffix(" kB")) < 1.1 * head
    assert "\nmoves to host memory and back: rank 0 moves most, 47.8 kB a batch; --target tells how long that takes" in printed


def test_the_time_of_moves_is_that_of_the_link_of_a_device():
    plan = jpipe.Plan.even("ab", 2, "gpipe", 2, offload={"optimizer": [1]})
    prediction = jpipe.simulate(jpipe.lower(plan, 4), [jpipe.programs.StageCost(optimizer=4 * 10**6)] * 2)
    words = host_words(prediction, 4, Device(name="a card", host={"bandwidth": "1 GB/s"}))
    assert words.endswith("rank 1 moves most, 8.0 MB a batch, 4 ms in each direction at the 1.0 GB/s assumed for a card")


@pytest.mark.thinned
@pytest.mark.parametrize(("delay", "fragments"), [(0, None), (1, None), (7, None), (30, "stages")])
@pytest.mark.parametrize("schedule", ["pipedream_flush", "pipedream_2bw", "pipedream"])
def test_pipelines_that_agree_after_the_window_hold_and_send_what_a_long_run_does(schedule, delay, fragments):
    sizes = {"weights": 1000, "accumulators": 1000, "optimizer": 2000, "residuals": 50}
    costs = [jpipe.programs.StageCost(**sizes, outputs=10), jpipe.programs.StageCost(**sizes, inputs=10, gradient=10)]
    plan = jpipe.Plan.even("ab", 2, schedule, 4, replicas=2, agree={"every": 50, "delay": delay, "fragments": fragments})
    whole = jpipe.simulate(jpipe.lower(plan, 100), costs)
    batches = 2 * jpipe.programs.batches_until_full(plan) + 3
    found, moved = with_agreements(plan, costs, jpipe.simulate(jpipe.lower(plan, batches), costs), batches)
    assert (found.held_bytes, found.peak_bytes) == (whole.held_bytes, whole.peak_bytes)
    assert moved == pytest.approx([of_rank / 100 for of_rank in whole.moved_bytes], rel=0.01)


def test_the_memory_of_a_config_whose_pipelines_agree_rarely_suffices_for_an_agreement(simulated, config):
    keys = [word for key in ("plan.replicas=2", "plan.schedule=gpipe") for word in ("--set", key)]
    rare, each = (table(simulated(config, "--no-compile", *keys, "--set", f"plan.agree={{every: {every}}}")) for every in (50, 1))
    assert rare["held"] == each["held"]
    # A rank sends about 512 bytes a batch to the other stage of its pipeline, and the changes.
    few, many = ([float(words.split()[0]) for words in columns["sends a batch"]] for columns in (rare, each))
    assert few == pytest.approx([512 + (1000 * of_rank - 512) / 50 for of_rank in many], rel=0.02)


@pytest.mark.exhaustive
def test_a_mesh_that_no_device_here_can_be_compiled_for_leaves_the_temporaries_unknown(simulated, config):
    printed = simulated(config, "--set", "plan.mesh={data: 32}", "--set", "train.batch_size=64")
    assert table(printed)["held, each device"]
    assert "and so the peak memory, need 32 devices to compile for" in printed


@pytest.mark.slow
def test_overrides_reach_the_config(simulated, config):
    assert simulated(config, "--set", "plan.schedule=gpipe", "--set", "plan.microbatches=4").startswith("gpipe: 2 stages, 4 microbatches")


def test_pictures_are_written_whole_and_named(simulated, config, plan_file, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    assert f"picture: {pictures}/plan.png\n" in simulated(plan_file(), "--png", f"{pictures}/plan.png")
    printed = simulated(config, "--png", f"{pictures}/config.png")
    assert f"pictures: {pictures}/config.png and {pictures}/config-memory.png\n" in printed
    files = {path.name: path.read_bytes() for path in pictures.iterdir()}
    assert files.keys() == {"plan.png", "config.png", "config-memory.png"}
    assert all(content.startswith(b"\x89PNG") and content.endswith(b"IEND\xaeB`\x82") for content in files.values())


@pytest.mark.parametrize("columns", [12, 40, 80])
def test_a_grid_wider_than_the_terminal_is_cut_between_ticks(simulated, plan_file, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    whole, printed = jpipe.simulate(jpipe.lower(jpipe.Plan.from_json(Path(plan_file()).read_text()), 3)).grid(), simulated(plan_file())
    lines = [line for line in printed.splitlines() if line.startswith(("tick", "rank ")) and "|" in line]
    assert all(full.startswith(line) for line, full in zip(lines, whole.splitlines(), strict=True))
    ticks = len(lines[0].split("|")[1].split())
    assert f"… the first {ticks} of 63 ticks; --png draws them all" in printed
    assert {len(line.split("|")[1].split()) for line in lines} == {ticks}
    assert max(map(len, lines)) <= max(columns, len("rank 0 |    0"))
    ends = [match.end() for match in re.finditer(r"\d+", whole.splitlines()[0])]
    assert ends[ticks] > columns


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("plan.json", ["--set", "train.steps=1"], r"--set train.steps=1: expected a config, found the plan '.*plan.json'; edit the plan"),
        ("plan.json", ["--batches", "0"], r"--batches: expected 1 or more, found 0"),
        ("plan.json", ["--batches", "1000000"], r"at most 500,000 forwards, found 4 stages × 4 microbatches × 1000000 batches; lower"),
        ("plan.json", ["--png", "plan.jpg"], r"--png: expected a name that ends in .png, found 'plan.jpg'"),
        ("plan.json", ["--png", "/nowhere/plan.png"], r"--png: cannot write '/nowhere/plan.png': No such file or directory; choose"),
        ("plan.json", ["--png", "folder.png"], r"--png: expected a file to write, found the folder 'folder.png'; choose another name"),
        ("missing.yaml", [], r"missing.yaml: cannot read the config: No such file or directory; give a YAML file"),
        ("missing.json", [], r"missing.json: cannot read it: No such file or directory; give a plan's JSON file or a config's YAML file"),
        ("half.json", [], r"half.json: expected a plan as JSON, found text that is not JSON or is cut off at line \d+, column \d+"),
        ("half.txt", [], r"half.txt: expected a plan as JSON, found text that is not JSON or is cut off at line \d+, column \d+"),
        ("empty.json", [], r"empty.json: expected a plan as JSON, found text that is not JSON or is cut off at line 1, column 1"),
        ("list.json", [], r"list.json: expected a JSON object with \"format\": \"jpipe-plan/1\", found 'list'; is this a plan of jpipe\?"),
        ("bytes.json", [], r"bytes.json: expected text in UTF-8, found other bytes; is this a plan or a config\?"),
        ("bytes.yaml", [], r"bytes.yaml: expected text in UTF-8, found other bytes; is this a plan or a config\?"),
        (
            "replicas.json",
            [],
            r"replicas.json: microbatches: expected a multiple of 3, so that the replicas of each stage, \[3, 1, 1, 1\], share",
        ),
        ("broken.yaml", [], r"broken.yaml, line 3, column 1: this YAML cannot be read"),
        ("text.yaml", [], r"text.yaml: expected a mapping of keys such as 'train:', found str"),
        ("tiny.yaml", ["--set", "plan.scheduler=gpipe"], r"unknown key 'plan.scheduler'; did you mean 'plan.schedule'\?"),
        ("tiny.yaml", ["--set", "plan.num_stages=9"], r"plan: expected between 1 and 3 stages \(the number of layers\), found 9"),
        ("tiny.yaml", ["--set", "plan.file=plan.json"], r"plan.json: layer 'embed' of the model is in no stage; add it to a stage"),
    ],
)
def test_mistakes_are_reported_in_one_message_and_nothing_is_written(
    config, plan_file, tmp_path, capsys, monkeypatch, content, arguments, message
):
    monkeypatch.chdir(tmp_path)
    plan = Path(plan_file()).read_text()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "half.json").write_text(plan[: len(plan) // 2])
    (tmp_path / "half.txt").write_text(plan[: len(plan) // 2])
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "replicas.json").write_text(plan.replace('"replicas": 1', '"replicas": 3', 1))
    (tmp_path / "broken.yaml").write_text("train:\n  steps: [1, 2\n")
    (tmp_path / "text.yaml").write_text("just words")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["simulate", str(tmp_path / content), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)
    assert printed.err.startswith("jpipe: ")
    assert printed.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_an_order_that_deadlocks_is_refused_with_the_grid(plan_file, capsys):
    path = plan_file("auto_zero_bubble", 2, 2, order=["F0.0 F0.1 B0.0 B0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"])
    text = Path(path).read_text()
    Path(path).write_text(text.replace("F0.0 F0.1 B0.0", "F0.0 B0.0 F0.1").replace("F1.0 I1.0 F1.1", "F1.0 F1.1 I1.0"))
    assert cli.main(["simulate", path]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    first, *grid = printed.err.splitlines()
    assert first.startswith(f"jpipe: {path}: order: expected an order in which each computation comes after what it needs, on all ranks; ")
    assert grid == [
        "tick   |    0    1",
        "rank 0 | F0.0    .  <<< waits for what B of microbatch 0 at stage 0 needs",
        "rank 1 |    . F0.0  <<< waits for what F of microbatch 1 at stage 1 needs",
    ]
