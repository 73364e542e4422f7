"""Runs of a whole model begin with parameters whose names are those of the model itself, from other programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from safetensors.numpy import save_file

import jpipe
from jpipe import InputError
from jpipe_train.checkpoint import warm_start
from jpipe_train.config.config import Config
from jpipe_train.launch.team import Team
from tests.jpipe.running import check_equal

X = np.ones((4, 3), np.float32)


@pytest.fixture(autouse=True)
def lenient():
    """Mix ranks and dtypes, as users' code may."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Net(nnx.Module):
    """Blocks in a list, batch statistics, dropout, and one kernel in two places."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.first(self.dropout(self.norm(x)))


class Body(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return x + linen.Dense(3)(linen.relu(x)), None


class Scanned(linen.Module):
    depth: int

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(3, name="first")(x))
        scan = linen.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        return linen.Dense(3)(scan(name="blocks")(x, None)[0])


def loss(outputs, labels):
    return ((outputs - labels) ** 2).sum(), labels.size


def pipeline(model: Any) -> jpipe.Pipeline:
    stack = jpipe.LayerStack.from_model(model, X[:2])
    return jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, "gpipe", 2), loss, optax.sgd(0.1))


@functools.cache
def scanned() -> jpipe.Pipeline:
    return pipeline(Scanned(3))


def loaded(pipe: jpipe.Pipeline, file: Any, **fields: Any) -> tuple[Any, str]:
    """Return the parameters with which a run begins, in the tree of the model, and what is said about them."""
    messages = []
    params = warm_start.load(Config(warm_start={"file": str(file), **fields}), pipe, (X, X), Team(None), messages.append)
    with jax.numpy_dtype_promotion("standard"):
        return pipe.params(pipe.init(jax.random.key(0), (X, X), params)), messages[-1]


def saved(folder: Any, tree: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    return folder


def flat(tree: Any, separator: str) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=separator): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def net():
    return nnx.clone(Net(nnx.Rngs(3)))


@pytest.fixture(scope="module")
def net_pipeline():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return pipeline(Net)


@pytest.mark.parametrize("kind", ["parameters", "state", "slashes", "dots", "other names", "other names with dots"])
def test_an_nnx_module(kind, net, net_pipeline, tmp_path):
    params, names = nnx.to_pure_dict(nnx.state(net, nnx.Param)), {}
    if kind == "parameters":
        file = saved(tmp_path / "item", nnx.state(net, nnx.Param))
    elif kind == "state":
        file = saved(tmp_path / "item", nnx.state(net, nnx.Not(nnx.RngKey)))  # with batch statistics and counters
    else:
        arrays, file = flat(params, "." if "dots" in kind else "/"), tmp_path / "file.safetensors"
        if "names" in kind:
            names = {"blocks/{n}": "encoder/h/{n}", "first/kernel": "embedding"}
            renamed = {"blocks": "encoder.h" if "dots" in kind else "encoder/h", "first.kernel": "embedding", "first/kernel": "embedding"}
            for old, new in renamed.items():
                arrays = {name.replace(old, new): array for name, array in arrays.items()}
        save_file(arrays, file)
    result, message = loaded(net_pipeline, file, names=names)
    check_equal(result, params)
    assert message.startswith("warm start: 4 of 4 layers from ")


@pytest.mark.exhaustive
def test_a_scanned_linen_module(tmp_path):
    variables = Scanned(3).init(jax.random.key(3), X)
    result, _ = loaded(scanned(), saved(tmp_path / "item", variables))
    check_equal(result, variables["params"])
    assert result["blocks"]["Dense_0"]["kernel"].shape == (3, 3, 3)


@pytest.mark.slow
def test_a_file_of_a_run_and_of_the_model_have_other_names(tmp_path):
    """What `jpipe export` writes has the names of layers."""
    pipe = scanned()
    state = pipe.init(jax.random.key(4), (X, X))
    by_layer = pipe.stack.traced.split(pipe.params(state), jax.tree.map(np.zeros_like, pipe.stack.traced.whole.specs[1]))
    save_file(
        {name: array for layer_id, (tree, _) in by_layer.items() for name, array in flat({layer_id: tree}, "/").items()}, tmp_path / "f"
    )
    check_equal(loaded(pipe, tmp_path / "f")[0], pipe.params(state))


def test_what_does_not_fit_is_reported_with_its_name_in_the_file(tmp_path):
    pipe = scanned()
    params = flat(Scanned(3).init(jax.random.key(3), X)["params"], ".")
    cases = {
        "deeper": {**params, **{name: array.repeat(2, 0) for name, array in params.items() if name.startswith("blocks")}},
        "more": {**params, "head.bias": X},
        "fewer": {name: array for name, array in params.items() if name != "first.bias"},
    }
    for name, arrays in cases.items():
        save_file(arrays, tmp_path / name)
    with pytest.raises(InputError, match=r"expected 'blocks\.0/bias' as in the model, float32\[3\], found float32\[6, 3\]"):
        loaded(pipe, tmp_path / "deeper")
    with pytest.raises(InputError, match=r"expected only parameters of the model, found 'head\.bias'"):
        loaded(pipe, tmp_path / "more")
    with pytest.raises(
        InputError, match=r"expected 'first/first/bias' as in the model, float32\[3\], found no 'first\.bias', its name in the file"
    ):
        loaded(pipe, tmp_path / "fewer")
    result, message = loaded(pipe, tmp_path / "deeper", mode="partial")
    np.testing.assert_array_equal(result["first"]["kernel"], params["first.kernel"])
    assert "at least partly fresh: blocks.0 ('blocks.0/bias' is float32[6, 3] in the file, float32[3] in the model)" in message
