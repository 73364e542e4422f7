"""The logical axes of the built-in models, and the collectives that XLA compiles on a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jpipe.plan import RULES
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train.losses.cross_entropy import loss
from tests.jpipe.running import check_close
from tests.lm.models.running import LLAMA, SMALL, params_of
from tests.lm.models.test_slices import EXPERTS, LENIENT, of, trained

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 8)), jnp.int32)
GPT = {**SMALL, "vocab_size": 64}
BLOCK = {
    "qkv/kernel": ("embed", "heads"),
    "project/kernel": ("heads", "embed"),
    "expand/kernel": ("embed", "mlp"),
    "contract/kernel": ("mlp", "embed"),
}
BIASES = {"qkv/bias": ("heads",), "project/bias": ("embed",), "expand/bias": ("mlp",), "contract/bias": ("embed",)}
ENDS = {"embed": {"token/embedding": ("vocab", "embed"), "position/embedding": (None, "embed")}}


def paths(tree):
    return {"/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.parametrize(
    ("keys", "axes"),
    [
        (GPT, {**ENDS, "block_1": BLOCK | BIASES, "head": {"logits/kernel": ("embed", "vocab")}}),
        (
            {**GPT, **LLAMA, "tied": True},
            {
                "embed": {"token/embedding": ("vocab", "embed")},
                "block_1": {**BLOCK, "gate/kernel": ("embed", "mlp")},
                "head": {"token/embedding": ("vocab", "embed")},
            },
        ),
        (
            {**GPT, "kind": "bert"},
            {
                "embed": ENDS["embed"] | {"type/embedding": (None, "embed")},
                "block_1": BLOCK | BIASES,
                "head": {
                    "token/embedding": ("vocab", "embed"),
                    "logits/bias": ("vocab",),
                    **{f"{part}/kernel": ("embed", None) for part in ("pooler", "next_sentence", "transform")},
                    **{f"{part}/bias": (None,) for part in ("pooler", "next_sentence", "transform")},
                },
            },
        ),
    ],
    ids=["gpt", "llama", "bert"],
)
def test_all_parameters_but_those_of_norms_name_logical_axes(keys, axes):
    specs = layers(ModelConfig(**keys)).specs(TOKENS)
    assert {layer_id: dict(specs[layer_id].axes) for layer_id in axes} == axes
    for spec in specs.values():
        shapes = {path: leaf.shape for path, leaf in paths(spec.params).items() if not path.split("/")[-2].endswith("norm")}
        assert {path: len(shape) for path, shape in shapes.items()} == {path: len(names) for path, names in spec.axes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{"heads": 4}, pytest.param({**LLAMA, "heads": 4, "kv_heads": 2}, marks=pytest.mark.exhaustive)], ids=["gpt", "llama"]
)
def test_on_a_mesh_nothing_is_gathered(keys):
    """Forward and backward gather neither weights nor logits nor activations; the numbers equal those of one device."""
    stack = layers(ModelConfig(**GPT | {"depth": 1} | keys), chunk=8)
    params, labels = params_of(stack, TOKENS), TOKENS[:, ::-1]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def mean_loss(params, tokens, labels):
        state = {layer_id: {} for layer_id in stack.ids}
        total, weight = loss(stack.apply(stack.ids, params, state, tokens, key=None, microbatch=None, train=True)[0], labels)
        return total / weight

    def sharding(*names):
        return NamedSharding(mesh, PartitionSpec(*(None if name is None else RULES[name] for name in names)))

    specs, rows = stack.specs(TOKENS), sharding("batch")
    of_params = {
        layer_id: jax.tree.unflatten(jax.tree.structure(tree), [sharding(*specs[layer_id].axes.get(path, ())) for path in paths(tree)])
        for layer_id, tree in params.items()
    }
    both = jax.jit(
        jax.value_and_grad(mean_loss), in_shardings=(of_params, rows, rows), out_shardings=(NamedSharding(mesh, PartitionSpec()), of_params)
    )
    program = both.lower(params, TOKENS, labels).compile()
    collectives = set(re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", program.as_text()))
    assert "all-reduce" in collectives
    assert "all-gather" not in collectives

    arguments = jax.device_put((params, TOKENS, labels), (of_params, rows, rows))
    actual, expected = program(*arguments), jax.jit(jax.value_and_grad(mean_loss))(params, TOKENS, labels)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), actual, expected)
    share = arguments[0]["block_0"]["qkv"]["kernel"].addressable_shards[0].data.size
    assert 2 * share == params["block_0"]["qkv"]["kernel"].size


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mesh": {"expert": 2}}, {"mesh": {"data": 2}, "fsdp": True}], ids=["experts", "fsdp"])
def test_slices_on_a_mesh_have_the_numbers_of_whole_rows(options):
    config = of(**LLAMA, experts=EXPERTS)
    with jax.enable_x64(True), LENIENT():
        check_close(trained(config, slices=(5, 7), **options), trained(config), 1e-10)
