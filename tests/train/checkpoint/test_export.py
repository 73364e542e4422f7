"""Exports of a run, by `jpipe export` and plain Orbax, and warm starts from them."""

import json
import re
import runpy
import shutil
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

import jpipe
import jpipe.checkpoints
from jpipe import InputError
from jpipe.runtime import without_prediction
from jpipe_train import cli
from jpipe_train.assemble import build
from jpipe_train.checkpoint import export, warm_start
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.checkpoint.weights import SavedWeights, by_name, by_path, with_ema
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from jpipe_train.run import loop
from tests.train.conftest import SENTENCE, changed

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "checkpoints.md"
STEPS = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> types.SimpleNamespace:
    """Train and export a run with two checkpoints and return its paths, data and final loss; no test writes to it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "text.txt").write_bytes(SENTENCE * 100)
    data = {
        "run": {"dir": str(folder / "runs" / "gpt")},
        "data": {"path": str(folder / "text.txt"), "validation_fraction": 0.2},
        "train": {"steps": STEPS, "batch_size": 4, "eval_every": STEPS, "eval_batches": 2, "trace_batches": 0},
        "model": {"depth": 1, "width": 8, "heads": 2, "seq_len": 8},
        "plan": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "arguments": {"momentum": 0.9}},
        "checkpoint": {"every": STEPS // 2},
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "write_report", lambda *_: None)  # it takes longer than the run
        summary = loop.main(changed(data))
    file = folder / "gpt.safetensors"
    export.write_file(ExportRequest(str(summary.folder), str(file)), print)
    return types.SimpleNamespace(folder=folder, data=data, run=summary.folder, loss=summary.val_loss_after, file=file)


def loaded(home, file, mode="strict", **sections):
    """Return the parameters that a warm start loads and the messages that it prints."""
    config = changed(home.data, warm_start={"file": str(file), "mode": mode}, **sections)
    pipe, batches = build.build(config, Reporter(1, 1, "", Console(quiet=True)))
    messages: list[str] = []
    params = warm_start.load(config, pipe, batches.train[0], Team(None), messages.append)
    return params, messages


def newest(run, step) -> dict:
    """Return the newest parameters in a checkpoint, by name."""
    arrays = {}
    for layer_id, parts in jpipe.checkpoints.Checkpoint(run, step).read().items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(parts["params"]["0"]):
            arrays["/".join([layer_id, *(key.key for key in path)])] = leaf
    return arrays


def named(params) -> dict:
    """Return the parameters of all layers in one dict, by name."""
    return {f"{layer_id}/{path}": array for layer_id, arrays in params.items() for path, array in arrays.items()}


def check_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name, strict=True)


@pytest.mark.parametrize("as_it_is", [lambda leaf: {"w": leaf}, lambda leaf: leaf], ids=["dict", "one array"])
def test_averages_and_masters_are_exported_in_float32(as_it_is):
    """The parameters of a layer are a dict or one array; the average is that of the masters."""
    weights, masters, average = np.ones(3, ml_dtypes.bfloat16), np.full(3, 1.001, np.float32), np.full(3, 0.9, np.float32)
    state = {"masters": as_it_is(masters), "state": {"optimizer": {"count": np.zeros(())}, "weights_ema": as_it_is(average)}}
    layers = {"a": {"params": {"0": by_path(as_it_is(weights))}, "optimizer": state}}
    for expected, exported in ((masters, layers), (average, with_ema(layers, 3))):
        (array,) = by_name(exported).values()
        np.testing.assert_array_equal(array, expected, strict=True)
    state["state"]["ahead"] = as_it_is(np.full(3, 0.25, np.float32))  # of a run with delay_correction
    for expected, layer in ((masters - np.float32(0.25), layers), (average, with_ema(layers, 3))):
        (array,) = by_name(layer).values()
        np.testing.assert_array_equal(array, expected, strict=True)


def test_parameters_without_masters_are_exported_without_prediction():
    ones = np.ones(3, np.float32)
    layers = {
        "a": {"params": {"0": {"w": ones, "frozen": ones}, "1": {"w": ones}}, "optimizer": {"optimizer": {}, "ahead": {"w": 2 * ones}}}
    }
    arrays = by_name(layers)
    np.testing.assert_array_equal(arrays["a/w"], -ones, strict=True)
    np.testing.assert_array_equal(arrays["a/frozen"], ones, strict=True)
    kept = without_prediction(layers["a"])
    assert kept["params"].keys() == {"0", "1"}
    assert kept["optimizer"] == {"optimizer": {}}
    assert without_prediction(kept) is kept


@pytest.mark.slow
def test_an_export_has_the_newest_parameters_by_name(home, tmp_path, capsys):
    check_equal(load_file(home.file), newest(home.run, STEPS))
    assert {"embed/token/embedding", "block_0/qkv/kernel", "head/logits/kernel"} <= load_file(home.file).keys()
    earlier = tmp_path / "earlier.safetensors"
    assert cli.main(["export", str(home.run), "--out", str(earlier), "--step", "20"]) == 0
    check_equal(load_file(earlier), newest(home.run, 20))
    assert not np.array_equal(load_file(earlier)["head/logits/kernel"], load_file(home.file)["head/logits/kernel"])
    output = capsys.readouterr().out
    assert re.fullmatch(rf"\S+earlier\.safetensors: 17 arrays, {earlier.stat().st_size:,} bytes, step 20 of \S+gpt\n", output)
    assert [path.name for path in tmp_path.iterdir()] == ["earlier.safetensors"]


@pytest.mark.slow
def test_a_warm_start_from_an_export_has_the_weights_of_the_exported_run(home, tmp_path, capsys):
    run = {"dir": str(tmp_path / "run")}
    summary = loop.main(changed(home.data, warm_start={"file": str(home.file)}, run=run, train={"steps": 1}, checkpoint={"every": None}))
    assert summary.val_loss_before == home.loss
    assert "warm start: 3 of 3 layers from" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_ignores_a_warm_start(home, tmp_path, capsys):
    run = {"dir": str(shutil.copytree(home.run, tmp_path / "run"))}
    loop.main(changed(home.data, run=run, train={"steps": STEPS + 1}, warm_start={"file": "nowhere.safetensors"}))
    output = capsys.readouterr().out
    assert "resumes at step 40" in output
    assert "warm_start is ignored, because it is for new runs" in output


@pytest.mark.slow
def test_a_warm_start_from_a_run_folder_equals_one_from_its_export(home):
    params, messages = loaded(home, home.run)
    check_equal(named(params), load_file(home.file))
    assert messages == [f"warm start: 3 of 3 layers from '{home.run}', step 40"]


def test_a_partial_warm_start_loads_what_fits_and_reports_what_does_not(home):
    params, messages = loaded(home, home.file, "partial", model={"depth": 2, "seq_len": 4})
    expected = load_file(home.file)
    del expected["embed/position/embedding"]
    check_equal(named(params), expected)
    assert messages == [
        f"warm start: 2 of 4 layers from '{home.file}'; at least partly fresh: embed ('embed/position/embedding' is "
        "float32[8, 8] in the file, float32[4, 8] in the model), block_1 ('block_1/attention_norm/bias' is missing)"
    ]
    _, (message,) = loaded(home, home.file, "partial", model={"depth": 7})
    assert message.endswith(" and 3 more")


def test_a_partial_warm_start_converts_dtypes_and_a_strict_one_does_not(home, tmp_path):
    file = tmp_path / "half.safetensors"
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in load_file(home.file).items()}
    save_file(halves, file)
    params, _ = loaded(home, file, "partial")
    check_equal(
        params["head"], {name.removeprefix("head/"): a.astype(np.float32) for name, a in halves.items() if name.startswith("head/")}
    )
    with pytest.raises(InputError, match=r"expected 'embed/position/embedding' as in the model, float32\[8, 8\], found bfloat16"):
        loaded(home, file)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"width": 4}},
            r"expected 'embed/\S+' as in the model, float32\[8, 4\], found float32\[8, 8\]; is it of another model\?",
        ),
        ({"model": {"depth": 2}}, r"expected 'block_1/\S+' as in the model, float32\[8\], found no such name"),
        (
            {"mode": "partial", "model": {"width": 4}},
            r"nothing matches: expected 'embed/\S+' as in the model, float32\[8, 4\], found .*\[8, 8\]",
        ),
    ],
)
def test_another_model_is_refused_by_its_first_difference(sections, message, home):
    for file in (home.file, home.run):
        with pytest.raises(InputError, match=rf"warm_start\.file: '{file}'.*: {message}"):
            loaded(home, file, **sections)


def test_arrays_that_the_model_lacks_are_refused_except_layer_state(home, tmp_path):
    arrays = load_file(home.file)
    save_file(arrays | {"head state/mean": np.zeros(3)}, tmp_path / "state.safetensors")
    loaded(home, tmp_path / "state.safetensors")
    save_file(arrays | {"tail/bias": np.zeros(3)}, tmp_path / "more.safetensors")
    with pytest.raises(InputError, match=r"expected only parameters of the model, found 'tail/bias', float64\[3\]"):
        loaded(home, tmp_path / "more.safetensors")
    save_file({f"other {name}": array for name, array in arrays.items()}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"expected names and shapes as in the model \('embed/\S+', …\), found 'other .*', …; rename them"):
        loaded(home, tmp_path / "other.safetensors", "partial")


def test_processes_agree_on_what_is_in_the_file(home, tmp_path, monkeypatch):
    agreed = []
    monkeypatch.setattr(Team, "agree", lambda self, facts: agreed.append(facts()))
    arrays = load_file(home.file)
    save_file({name: array + 1 for name, array in arrays.items()}, tmp_path / "more.safetensors")
    for file in (home.file, home.file, tmp_path / "more.safetensors"):
        loaded(home, file)
    first, second, other = (facts["warm_start.file"] for facts in agreed)
    assert first == second != other


def test_invalid_files_are_refused(home, tmp_path):
    cut, text, empty = (tmp_path / f"{name}.safetensors" for name in ("cut", "text", "empty"))
    cut.write_bytes(home.file.read_bytes()[:-1])
    text.write_text("no weights in here, only words")
    save_file({}, empty)
    with pytest.raises(InputError, match=r"warm_start\.file: cannot find 'x+': File name too long; choose another"):
        loaded(home, "x" * 300)
    with pytest.raises(
        InputError, match=r"cut\.safetensors': expected [\d,]+ bytes, as its header says, found [\d,]+: it is cut off; give"
    ):
        loaded(home, cut)
    for file in (text, tmp_path / "missing.safetensors"):
        with pytest.raises(InputError, match=r"warm_start\.file: '.*': expected a safetensors file, or the folder of .*, found: .+; give"):
            loaded(home, file)
    with pytest.raises(InputError, match=r"found no such name"):
        loaded(home, empty)
    with pytest.raises(
        InputError, match=r"warm_start\.file: expected checkpoints in '.*', found none; give the folder of a run that wrote"
    ):
        loaded(home, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"warm_start\.file: '.*' has an adapter_config\.json: .* and this one as warm_start\.adapters"):
        loaded(home, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "new.safetensors"], r"export: expected checkpoints in 'none/checkpoints', but there is no folder 'none'"),
        (["{text}", "--out", "new.safetensors"], r"export: cannot read '{text}': Not a directory; give the folder of a run"),
        (["{run}", "--out", "new.bin"], r"--out: expected a name that ends in \.safetensors, found 'new\.bin'"),
        (["{run}", "--out", "{file}"], r"--out: '{file}' already exists; choose another name, or remove it first"),
        (
            ["{run}", "--out", "no/new.safetensors"],
            r"--out: there is no folder for 'no/new\.safetensors'; make it first, or choose another",
        ),
        (["{run}", "--out", "new.safetensors", "--step", "30"], r"--step: expected one of 20, 40, the checkpoints in '{run}', found 30"),
        (["{run}", "--out", "x" * 300 + ".safetensors"], r"--out: cannot find 'x+\.safetensors': File name too long; choose another"),
    ],
)
def test_impossible_exports_are_refused_in_one_line(words, message, home, tmp_path, monkeypatch, capsys):
    names = {"run": home.run, "file": home.file, "text": home.folder / "text.txt", "none": tmp_path / "none"}
    words = [word.format(**names) for word in words]
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", *([str(names["none"])] if words[0] == "--out" else []), *words]) == 2
    expected = message.format(**names)
    assert re.fullmatch(rf"jpipe: {expected}.*\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_exported(home, tmp_path, capsys):
    run = shutil.copytree(home.run, tmp_path / "run")
    damaged = max((run / "checkpoints" / "40").rglob("d/*"), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    out = tmp_path / "out.safetensors"
    assert cli.main(["export", str(run), "--out", str(out), "--step", "40"]) == 2
    assert damaged.name in capsys.readouterr().err
    assert not out.exists()
    assert cli.main(["export", str(run), "--out", str(out)]) == 0
    assert damaged.name in capsys.readouterr().out
    check_equal(load_file(out), newest(run, 20))


def test_layer_state_has_its_own_name_and_that_of_other_replicas_is_omitted():
    w, mean = np.ones(2), np.zeros(3)
    layers = {
        "norm.0": {"params": {"0": {"a/b": w}, "1": {"a/b": 2 * w}}, "optimizer": {"mu": {"a/b": w}}, "state": {"mean": mean}},
        "norm.0 replica 1": {"state": {"mean": mean + 1}},
        "act": {},
        "one": {"params": {"0": {"array": w}}},
    }
    check_equal(by_name(layers), {"norm.0/a/b": w, "norm.0 state/mean": mean, "one/array": w})
    with pytest.raises(InputError, match="two arrays of the checkpoint would both be 'norm state/mean'"):
        by_name({"norm": {"state": {"mean": mean}}, "norm state": {"params": {"0": {"mean": w}}}})


@pytest.mark.usefixtures("no_report")
@pytest.mark.exhaustive
def test_the_average_of_the_weights_is_evaluated_and_exported(home, tmp_path, capsys):
    """With a decay of 0 the average equals the weights."""
    sections = {"train": {"steps": 6, "eval_every": 2, "batch_size": 4, "eval_batches": 1, "trace_batches": 0}, "checkpoint": {"every": 3}}
    of_weights = {"eval": {"metrics": {"accuracy": "accuracy"}}, "optimizer": {"ema_decay": 0.0, "accumulate_batches": 2}}
    run = loop.main(changed(home.data | {"run": {"dir": str(tmp_path / "run")}}, **sections, **of_weights)).folder
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4, 5]
    assert set(evaluated[0]) >= {"val_loss", "val_loss_ema", "val_accuracy", "val_accuracy_ema"}
    assert [evaluated[i]["val_loss_ema"] for i in (0, 3)] == [evaluated[i]["val_loss"] for i in (0, 3)]  # at rest
    assert len({row["val_loss_ema"] for row in evaluated}) == 4, "an update every two batches, seen at once after a drain"
    assert evaluated[1]["val_loss"] == evaluated[0]["val_loss"], "2BW is a batch behind"
    check_equal(*(exported(run, tmp_path / f"{weights}.safetensors", weights) for weights in ("newest", "ema")))
    assert cli.main(["export", str(home.run), "--out", str(tmp_path / "no.safetensors"), "--weights", "ema"]) == 2
    refusal = (
        "--weights: the checkpoint of step 40 has no moving average of the weights (layer 'embed'); leave out --weights, or train with"
    )
    assert refusal in capsys.readouterr().err


def exported(run, file, weights) -> dict:
    assert cli.main(["export", str(run), "--out", str(file), "--weights", weights]) == 0
    return load_file(file)


def test_an_export_of_the_average_has_the_dtypes_of_the_weights():
    w = np.ones(3, ml_dtypes.bfloat16)
    layers = {
        "a": {"params": {"0": {"w": w}}, "optimizer": {"optimizer": {}, "weights_ema": {"w": np.full(3, 0.5, np.float32)}}},
        "act": {},
    }
    check_equal(by_name(with_ema(layers, 1)), {"a/w": w * w.dtype.type(0.5)})


def test_an_export_has_the_masters_and_no_other_optimizer_state():
    short, master = np.ones(2, np.float16), np.full(2, 1.25, np.float32)
    layers = {
        "a": {"params": {"0": {"w": short}}, "optimizer": {"masters": {"w": master}, "state": {"mu": {"w": short}}}},
        "b": {"params": {"0": {"w": short}}, "optimizer": {"masters": {"b": {"w": master}}}},  # of a user's optimizer, by layer id
    }
    check_equal(by_name(layers), {"a/w": master, "b/w": short})


def test_weights_are_read_by_layer_and_an_unknown_layer_is_named(home):
    saved = SavedWeights(jpipe.checkpoints.Checkpoint(home.run, STEPS))
    read = {name: array for layer_id in saved.layers for name, array in saved.read([layer_id]).items()}
    check_equal(read, newest(home.run, STEPS))
    assert {name: (array.shape, str(array.dtype)) for name, array in read.items()} == saved.specs
    with pytest.raises(InputError, match="expected the layer 'tail', found embed, "):
        saved.read(["embed", "tail"])


def test_an_export_holds_arrays_of_any_order(home, tmp_path, monkeypatch):
    shuffled = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    monkeypatch.setattr(
        jpipe.checkpoints.Checkpoint, "read", lambda *_, **__: {"a": {"params": {"0": {"w": shuffled, "n": np.float32(3)}}}}
    )
    export.write_file(ExportRequest(str(home.run), str(tmp_path / "a.safetensors")), print)
    check_equal(load_file(tmp_path / "a.safetensors"), {"a/w": np.arange(6.0).reshape(2, 3), "a/n": np.array(3, np.float32)})


def test_the_pages_snippet_reads_a_checkpoint_without_jpipe(home, tmp_path, monkeypatch):
    """The snippet runs unchanged in a folder that contains the run."""
    section = PAGE.read_text().split("\n## With Orbax\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert not re.search(r"\b(jpipe|train)\b", code)
    code = code.replace("runs/mine", home.run.relative_to(home.folder).as_posix())
    script = tmp_path / "snippet.py"
    script.write_text(code)
    monkeypatch.chdir(home.folder)
    params = runpy.run_path(str(script))["params"]
    arrays = {f"{layer_id}/{name}": np.asarray(array) for layer_id, tree in params.items() for name, array in by_path(tree).items()}
    check_equal(arrays, newest(home.run, STEPS))


def scanned(params, x):
    """Run a model whose layers are stacked, along the second axis in one array."""

    def step(x, layer):
        return jnp.tanh(x @ layer[0] + layer[1][None]), None

    return jax.lax.scan(step, x, (jnp.moveaxis(params["blocks"]["w"], 1, 0), params["blocks"]["b"]))[0] @ params["out"]


def test_an_export_of_a_whole_model_is_stacked_as_the_model_is():
    w, b = np.arange(36, dtype=np.float32).reshape(3, 4, 3), np.arange(12, dtype=np.float32).reshape(4, 3)
    params = {"blocks": {"w": w, "b": b}, "out": np.eye(3, dtype=np.float32)}
    stack = jpipe.LayerStack.from_function(scanned, params, np.ones((2, 3), np.float32))
    by_layer = {layer_id: by_path(trees[0]) for layer_id, trees in stack.initial.items()}
    arrays = {f"{layer_id}/{path}": np.asarray(array) for layer_id, tree in by_layer.items() for path, array in tree.items()}
    assert len(arrays) == 9
    locations = json.loads(json.dumps(stack.traced.places()))
    check_equal(export.of_whole_model(arrays, {"model": locations}), {"blocks/w": w, "blocks/b": b, "out": params["out"]})
    with pytest.raises(InputError, match="found a run of layers"):
        export.of_whole_model(arrays, {})
    locations["params"].pop(next(name for name in locations["params"] if locations["params"][name][0] == "blocks/w"))
    with pytest.raises(InputError, match="does not say where its arrays are"):
        export.of_whole_model(arrays, {"model": locations})
