"""What runs of layers that were cut from a model begin with: arrays of the user, else those of the model, else fresh ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jpipe import InputError, LayerStack, Pipeline, Plan
from tests.jpipe.models import squares
from tests.jpipe.running import check_equal, layer_state

pytestmark = pytest.mark.usefixtures("lenient")
BATCH = np.ones((4, 8), np.float32), np.zeros((4, 3), np.float32)


class Model(nnx.Module):
    """A kernel that is used twice, and layer state between."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.norm(self.first(x)) @ self.first.kernel.T))


def trained() -> Model:
    """Return a model whose layer state is not that of a new one."""
    model = Model(nnx.Rngs(7))
    model.norm.mean[...] = jnp.arange(2.0)
    return model


def pipeline(model) -> Pipeline:
    stack = LayerStack.from_model(model, BATCH[0], cuts=["norm", "last"])
    assert len(stack.ties.first) == 1
    return Pipeline(stack, Plan.even(stack.ids, 2, "pipedream_flush", 1), squares, optax.sgd(0.1))


def begun(pipe: Pipeline, params=None):
    """Return the parameters of the model, and its layer state, as a run begins."""
    state = pipe.init(jax.random.key(3), BATCH, params=params)
    return pipe.params(state), jax.tree.leaves(layer_state(state))


def arrays(model: Model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), jax.tree.leaves(nnx.state(model, nnx.BatchStat))


ABSTRACT = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))


@pytest.mark.slow
def test_a_run_begins_with_the_arrays_of_the_model():
    check_equal(begun(pipeline(trained())), arrays(trained()))
    made = begun(pipeline(Model)), arrays(Model(nnx.Rngs(jax.random.key(3))))
    jax.tree.map(lambda actual, eager: np.testing.assert_allclose(actual, eager, rtol=1e-6), *made)  # compiled, the last bit may differ


@pytest.mark.parametrize("model", [Model, Model(nnx.Rngs(0)), ABSTRACT], ids=["constructor", "built", "abstract"])
def test_a_model_as_parameters_has_its_layer_state_too(model):
    check_equal(begun(pipeline(model), trained()), arrays(trained()))


def test_parameters_that_are_left_out_are_those_of_the_model():
    kernel = np.full((8, 2), 2, np.float32)
    params, state = begun(pipeline(trained()), {"first": {"kernel": kernel}})
    expected = arrays(trained())
    expected[0]["first"]["kernel"] = kernel
    check_equal((params, state), expected)


def test_parameters_are_in_the_tree_of_the_model_or_by_layer():
    """Ids of layers may be names in the tree, too: it is read as the tree of the model where it can be."""
    pipe = pipeline(Model)
    expected = arrays(trained())[0]
    check_equal(begun(pipe, expected)[0], expected)
    check_equal(begun(pipe, {"last": expected["last"]})[0]["last"], expected["last"])
    by_layer = {layer_id: params for layer_id, (params, _) in pipe.stack.by_layer(trained()).items()}
    assert by_layer["norm"].keys() != expected["norm"].keys()
    check_equal(begun(pipe, by_layer)[0], expected)


def test_what_an_abstract_model_lacks_is_named():
    with pytest.raises(InputError, match="the model: an abstract model has no arrays to begin with"):
        begun(pipeline(ABSTRACT))
    with pytest.raises(InputError, match=r"params: layer '.*': '.*' is missing, and an abstract model cannot initialize it"):
        begun(pipeline(ABSTRACT), arrays(trained())[0])
