"""A run starts from the parameters of any Orbax checkpoint, and Orbax restores an export without jpipe."""

import gc
import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from rich.console import Console
from safetensors.numpy import save_file

from jpipe import InputError
from jpipe.checkpoints.writing import complete, write_layers
from jpipe_train.assemble.build import build, param_specs
from jpipe_train.checkpoint import export, warm_start
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.checkpoint.sources import orbax_checkpoint
from jpipe_train.checkpoint.sources.name_map import name_in_file, renamed
from jpipe_train.checkpoint.sources.source import Spec
from jpipe_train.checkpoint.warm_start import fitting
from jpipe_train.checkpoint.weights import by_path
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from tests.train.conftest import changed

W, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
MODEL = {f"block_{i}": {f"block_{i}/dense/{name}": Spec(a.shape, "float32") for name, a in (("w", W), ("b", B))} for i in range(2)}
NAMES = {"block_{n}/dense/w": "layers/{n}/kernel", "block_{n}/dense/b": "layers/{n}/bias"}
PLAIN = {"layers": [{"kernel": W + i, "bias": B + i} for i in range(2)]}


def saved(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


class Stack(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)) for _ in range(2)])
        for i, layer in enumerate(self.layers):
            layer.kernel[...], layer.bias[...] = W + i, B + i


KINDS = {
    "plain": PLAIN,
    "linen variables": {"params": PLAIN, "batch_stats": {"mean": B}},
    "nnx": nnx.state(Stack(), nnx.Param),
    "nnx of a train state": {"params": nnx.state(Stack(), nnx.Param), "step": 3, "opt_state": [{"mu": W}]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_any_tree_by_a_name_map(kind, tmp_path):
    source = renamed(orbax_checkpoint.source(saved(tmp_path / "item", KINDS[kind])), NAMES, [n for s in MODEL.values() for n in s])
    assert fitting(source, MODEL, strict=True) == {name for specs in MODEL.values() for name in specs}
    (arrays,) = source.read({"block_1": ["block_1/dense/w"]})
    np.testing.assert_array_equal(arrays.pop("block_1/dense/w"), W + 1)
    assert not arrays


def test_a_warm_start_reads_a_step_of_a_manager_or_the_newest(tmp_path):
    with ocp.CheckpointManager(tmp_path / "single") as manager:
        for step in (2, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": W + step}))
    with ocp.CheckpointManager(tmp_path / "several", item_names=("params", "opt")) as manager:
        items = {"params": ocp.args.StandardSave({"w": W + 7}), "opt": ocp.args.StandardSave({"w": W})}
        manager.save(3, args=ocp.args.Composite(**items))
    for folder, shift in (("single", 10), ("single/2", 2), ("single/2/default", 2), ("several", 7), ("several/3/opt", 0)):
        assert orbax_checkpoint.is_meant(tmp_path / folder)
        (arrays,) = orbax_checkpoint.source(tmp_path / folder).read({"": ["w"]})
        np.testing.assert_array_equal(arrays["w"], W + shift)
    assert not orbax_checkpoint.is_meant(tmp_path)
    assert orbax_checkpoint.source(tmp_path / "single").digest() != orbax_checkpoint.source(tmp_path / "single" / "2").digest()


def test_invalid_parameters_are_refused(tmp_path):
    item = saved(tmp_path / "a", {"w": W})
    saved(tmp_path / "b", {"w": W})
    with pytest.raises(InputError, match="expected a single item, or an item called params, found a, b; give the folder of an item"):
        orbax_checkpoint.source(tmp_path)
    (item / "d" / "more").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="expected files and folders, found 'd/more', which is neither"):
        orbax_checkpoint.source(item)
    (item / "d" / "more").unlink()
    (item / "_METADATA").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"expected an Orbax checkpoint, found one that cannot be read \(RecursionError"):
        orbax_checkpoint.source(item)
    entry = {"key_metadata": [{"key": "../b/w", "key_type": 2}], "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False}}
    (item / "_METADATA").write_text(json.dumps({"tree_metadata": {"x": entry}, "use_ocdbt": False, "use_zarr3": False}))
    with pytest.raises(InputError, match=r"ValueError: expected names without '/' for arrays in separate folders"):
        orbax_checkpoint.source(item)
    write_layers(tmp_path / "run", 4, {"layer": {"params": {"0": {"w": W}}}}, 0)
    complete(tmp_path / "run", 4, 1, {})
    for folder in ("checkpoints", "checkpoints/4"):
        with pytest.raises(InputError, match="expected the folder of the run, found one of its checkpoints; give that folder"):
            orbax_checkpoint.source(tmp_path / "run" / folder)
    assert not orbax_checkpoint.is_meant(tmp_path / "run")


@pytest.mark.thinned
@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_missing_headers_of_arrays_are_an_error_without_tracebacks(ocdbt, zarr3, tmp_path, capfd, caplog):
    """Orbax is not asked for arrays that are missing: its remaining requests would fail on standard error."""
    item = tmp_path / "item"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
        checkpointer.save(item, args=ocp.args.PyTreeSave({"layers": [W + i for i in range(40)], "steps": 3}))
    assert len(orbax_checkpoint.source(item).specs) == 41
    for file in [item / "manifest.ocdbt"] if ocdbt else item.glob("layers.*/" + ("zarr.json" if zarr3 else ".zarray")):
        file.unlink()
    capfd.readouterr()
    caplog.clear()
    with pytest.raises(InputError, match=r"one that cannot be read \(ValueError: the index lacks the array 'layers\.0'"):
        orbax_checkpoint.source(item)
    gc.collect()  # reports exceptions that nobody has looked at
    assert (capfd.readouterr().err, caplog.messages) == ("", [])


def test_an_array_that_cannot_be_read_is_an_error_without_tracebacks(tmp_path, capfd, caplog):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave({str(i): W + i for i in range(40)}))
    source = orbax_checkpoint.source(tmp_path / "item")
    for i in (1, 7):
        (tmp_path / "item" / str(i) / "0.0").unlink()
    capfd.readouterr()
    caplog.clear()
    with pytest.raises(InputError, match=r"one that cannot be read \(ValueError: NOT_FOUND: .*1/0\.0"):
        next(iter(source.read({"": [str(i) for i in range(40)]})))
    gc.collect()  # reports exceptions that nobody has looked at
    assert (capfd.readouterr().err, caplog.messages) == ("", [])


def test_shapes_are_compared_with_the_model_before_an_array_is_read(tmp_path, monkeypatch):
    source = orbax_checkpoint.source(saved(tmp_path / "item", {"block_0": {"dense": {"w": W.T, "b": B}}}))
    monkeypatch.setattr("jpipe.checkpoints.orbax_item.read_tree", lambda *_: pytest.fail("an array is read"))
    with pytest.raises(InputError, match=r"expected 'block_0/dense/w' as in the model, float32\[2, 3\], found float32\[3, 2\]"):
        fitting(source, MODEL, strict=True)


def test_a_name_missing_in_the_file_is_reported_as_the_map_spells_it(tmp_path):
    item, names = saved(tmp_path / "item", PLAIN), NAMES | {"block_{n}/dense/b": "layers/{n}/offset"}
    source = renamed(orbax_checkpoint.source(item), names, [name for specs in MODEL.values() for name in specs])
    with pytest.raises(InputError, match=r"expected 'block_0/dense/b' .*, found no 'layers/0/offset', its name in the file"):
        fitting(source, MODEL, strict=True)


def test_names_by_whole_parts_and_numbers():
    names = {"block_{n}/qkv": "h/{n}/attn/c_attn", "block_{i}": "h/{i}", "embed/token": "wte"}
    assert name_in_file("block_12/qkv/kernel", names) == "h/12/attn/c_attn/kernel"
    assert name_in_file("block_1/mlp/kernel", names) == "h/1/mlp/kernel"
    assert name_in_file("embed/token", names) == "wte"
    assert name_in_file("embed/tokens", names) == "embed/tokens"
    assert name_in_file("embed/token", {"": "model"}) == "model/embed/token"
    assert name_in_file("model/embed/token", {"model": ""}) == "embed/token"
    for wrong in ({"a_{n}": "b_{m}"}, {"a_{n}/{n}": "b"}, {"a_{}": "b"}):
        with pytest.raises(ValueError, match=r"names: expected placeholders such as \{n\}, each once on the left, found 'a_"):
            Config.model_validate({"warm_start": {"names": wrong}})


def test_orbax_restores_an_export_without_jpipe(tmp_path, capsys):
    layers = {"in.0": {"params": {"0": {"w": W}}}, "norm": {"params": {"0": {"b": B}}, "state": {"mean": B + 1}}, "act": {}}
    write_layers(tmp_path, 4, layers, 0)
    complete(tmp_path, 4, 1, {})
    export.write_orbax(ExportRequest(str(tmp_path), str(tmp_path / "out")), print)
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: 3 arrays, ")
    tree = ocp.StandardCheckpointer().restore(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, tree, {"in.0": {"w": W}, "norm": {"b": B}, "norm state": {"mean": B + 1}})
    with pytest.raises(InputError, match=r"--out: '.*out' already exists"):
        export.write_orbax(ExportRequest(str(tmp_path), str(tmp_path / "out")), print)
    assert orbax_checkpoint.source(tmp_path / "out").specs == {
        "in.0/w": Spec((2, 3), "float32"), "norm/b": Spec((3,), "float32"), "norm state/mean": Spec((3,), "float32")
    }  # fmt: skip
    with pytest.raises(InputError, match="export: a tree cannot hold 'a/b'"):
        export._write_item(tmp_path / "no", {"a": W, "a/b": B})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
def test_a_run_begins_with_parameters_of_other_names(kind, tiny, tmp_path):
    pipe, batches = build(changed(tiny), Reporter(1, 1, "tokens", Console(quiet=True)))
    specs = param_specs(pipe.stack, pipe.plan, batches.train[0])
    names = {f"{layer_id}/{path}": leaf for layer_id, tree in specs.items() for path, leaf in by_path(tree).items()}
    renaming = {"block_{n}": "h/{n}", "embed/token": "wte"}
    arrays = {name_in_file(name, renaming): np.full(leaf.shape, i, leaf.dtype) for i, (name, leaf) in enumerate(names.items())}
    assert "h/0/qkv/kernel" in arrays
    if kind == "orbax":
        (tmp_path / "file").mkdir()
        export._write_item(tmp_path / "file" / "item", arrays)
        file = tmp_path / "file" / "item"
    else:
        file = tmp_path / "file.safetensors"
        save_file(arrays, file)
    messages = []
    config = Config(warm_start={"file": str(file), "names": renaming})
    params = warm_start.load(config, pipe, batches.train[0], Team(None), messages.append)
    for i, name in enumerate(names):
        layer_id, _, path = name.partition("/")
        assert (params[layer_id][path] == i).all()
    assert messages[0].startswith("warm start: 3 of 3 layers from ")
