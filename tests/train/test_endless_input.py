"""Input that is endless, or would take all memory or hours, is refused at once."""

import json
import math
import os
import re

import jax
import jax.numpy as jnp
import pytest
import yaml

import jpipe
from jpipe_planner import Topology, read_graph_txt
from jpipe_planner.machine.plain_yaml import dump, parse
from jpipe_train import cli
from jpipe_train.plan.profiling import sizes_for
from jpipe_train.report.metrics_log import Evaluated, mean_loss, means

COMMANDS = {
    "train": ["train", "{}.yaml"],
    "simulate": ["simulate", "{}.yaml"],
    "simulate a plan": ["simulate", "{}.json"],
    "plan.file": ["train", "tiny.yaml", "--set", "plan.file={}.json"],
    "topology": ["plan", "tiny.yaml", "--topology", "{}.yaml"],
    "profile": ["plan", "--topology", "flat.yaml", "--batch", "4", "--profile", "{}.json"],
    "graph.txt": ["plan", "--topology", "flat.yaml", "--batch", "4", "--profile", "{}.txt"],
}
FLAT = "format: jpipe-topology/1\nlevels: [{count: 2, bandwidth: 1 GB/s}]\n"


@pytest.fixture
def error_line(tiny, tmp_path, monkeypatch, capsys):
    """Run `jpipe`, which must refuse in one line; gives the line."""
    jax.devices()  # as many as the tests have, before a command asks for more
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    (tmp_path / "flat.yaml").write_text(FLAT)

    def run(*words: str) -> str:
        capsys.readouterr()
        assert cli.main(words) == 2
        line = capsys.readouterr().err
        assert line.startswith("jpipe: ")
        assert line.count("\n") == 1
        assert len(line) < 1000
        return line

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_endless_files_are_not_read(error_line, tmp_path, command):
    ending = re.search(r"{}(\.\w+)", " ".join(COMMANDS[command]))[1]
    (tmp_path / f"zero{ending}").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / f"fifo{ending}")
    with (tmp_path / f"large{ending}").open("wb") as file:
        file.truncate(2**40)  # no blocks on the disk
    for name, why in (("zero", "it is not a regular file"), ("fifo", "it is not a regular file"), ("large", r"it is larger than \d+ MiB")):
        line = error_line(*(word.format(name) for word in COMMANDS[command]))
        assert re.search(rf"cannot read .*: {why}", line)
        assert f"{name}{ending}" in line


def test_weights_to_begin_with_are_not_read_from_a_fifo(error_line, tmp_path):
    os.mkfifo(tmp_path / "fifo.safetensors")
    line = error_line("train", "tiny.yaml", "--set", "warm_start.file=fifo.safetensors")
    assert re.search("warm_start.file: 'fifo.safetensors': expected a safetensors file, .*, found no regular file", line)


def test_patterns_are_counted(error_line, tmp_path, tiny):
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(tiny | {"optimizer": {"decay": ["*"] * 300}}))
    assert re.search(r"optimizer\.decay: expected at most 256 items", error_line("train", "many.yaml"))
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(tiny | {"optimizer": {"decay": ["*a" * 200]}}))
    assert re.search(r"optimizer\.decay\.0: expected .* at most 256 characters", error_line("train", "many.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream"])
def test_plans_of_too_many_stages_are_not_simulated(error_line, tmp_path, schedule):
    stages = [{"layers": [f"l{i}"]} for i in range(20_000)]
    (tmp_path / "plan.json").write_text(json.dumps({"format": "jpipe-plan/1", "schedule": schedule, "microbatches": 1, "stages": stages}))
    expected = r"simulate: expected (at most 500,000 forwards|a picture of at most 50,000,000 ticks of all ranks), found .*; lower"
    assert re.search(expected, error_line("simulate", "plan.json"))


@pytest.mark.parametrize("option", ["--batch", "--rows"])
def test_absurd_batch_sizes_are_refused(error_line, tmp_path, option):
    (tmp_path / "graph.txt").write_text(NODE)
    words = ["plan", "--topology", "flat.yaml", "--profile", "graph.txt", option, str(10**15)]
    assert f"{option}: expected at most 1,000,000,000, found 1,000,000,000,000,000; is it a typo?" in error_line(*words)


def test_sizes_of_a_large_batch_take_no_time():
    assert sizes_for(10**9, 4, 4) == sizes_for(10**9, 4, 4)
    assert all(10**9 % rows == 0 for rows in sizes_for(10**9, 4, 12))
    assert sizes_for(24, 2, 4) == (4, 8, 12, 24)


NODE = "node1 -- Conv(3) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=[8.0; 8.0], parameter_size=4.0\n"


@pytest.mark.parametrize(
    "line",
    [
        "a" * 100_000,
        "node1 -- " + "x" * 100_000,
        "\tnode1 -- " + "a" * 100_000,
        "\t" + "a" * 100_000 + " -- node1",
        f"node1 -- a -- {'a=[,' * 25_000}",
    ],
    ids=["word", "node", "target", "source", "brackets"],
)
def test_long_lines_of_a_profile_are_refused(line):
    with pytest.raises(
        jpipe.InputError, match=r"graph\.txt, line 2: expected at most 10,000 characters, found 1\d\d,\d\d\d; is this a prof"
    ):
        read_graph_txt(f"{NODE}{line}\n", 1)


def test_lines_just_short_enough_are_read_in_no_time():
    for line in ("node2 -- x -- " + "a" * 9_900, f"node2 -- a -- {'a=[,' * 2_400}"):
        with pytest.raises(jpipe.InputError, match=r"graph\.txt, line \d+: expected 'nodeN -- DESCRIPTION -- "):
            read_graph_txt(NODE + f"{line}\n" * 20, 1)
    assert read_graph_txt(NODE, 1).layers[0].at[0].residuals == {"none": 16}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("1 GB/s", "1e-320", r"levels\.0\.bandwidth: expected a number from 0\.001 to 1e30, found 9\.99989e-321; is it a typo\?"),
        ("1 GB/s", "1e300", r"levels\.0\.bandwidth: expected a number from 0\.001 to 1e30, found 1e\+300"),
        ("1 GB/s}", "1 GB/s, latency: 1e300}", r"levels\.0\.latency: expected less than or equal to 1000000000, found 1e\+300"),
        ("]\n", "]\ndevice: {memory: 1e-320}\n", r"device\.memory: expected a number from 0\.001 to 1e30"),
        ("]\n", "]\ndevice: {flops: {float32: 1e-320}}\n", r"device\.flops\.float32: expected a number from 0\.001 to 1e30"),
        ("]\n", "]\ndevice: {efficiency: 1e-320}\n", r"device\.efficiency: expected greater than or equal to 0.000001"),
    ],
)
def test_impossible_machines_are_refused(old, new, why):
    with pytest.raises(jpipe.InputError, match=rf"^topology: {why}"):
        Topology.from_yaml(FLAT.replace(old, new))


@pytest.mark.parametrize("value", ["1e-3", "-.5", "0o17", "+010", "0x1", "yes", "1:30", "2001-01-01", "null", "", 1e-3, 3, None, ["a"] * 3])
def test_yaml_round_trip(value):
    shared = [value]
    data = {"a": shared, "b": shared, "c": {"d": value}}
    assert repr(parse(dump(data), "x")) == repr(data)


def evaluation(weight: float) -> jpipe.Evaluation:
    return jpipe.Evaluation(jnp.float32(0), jnp.float32(weight), 0, {"hits": jpipe.Mean(jnp.float32(1), jnp.float32(0))})


def test_a_validation_without_counted_labels_is_reported():
    with pytest.raises(jpipe.InputError, match=r"^validation: the weights that the loss returns for the 2 validation batches sum to 0, so"):
        mean_loss([Evaluated(evaluation(0)), Evaluated(evaluation(0))])
    result = means([Evaluated(evaluation(0)), Evaluated(evaluation(2))])
    assert result["val_loss"] == 0
    assert math.isnan(result["val_hits"])
