"""The patterns of `tune.freeze` and `tune.train_only`, with whatever the optimizer is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jpipe
from jpipe import InputError
from jpipe_lm.config.tune_config import TuneConfig
from jpipe_train.assemble import build
from jpipe_train.assemble.frozen import trains_part
from jpipe_train.assemble.optimizer import optimizer
from jpipe_train.config.config import OptimizerConfig
from jpipe_train.console.progress import Reporter
from tests.train.conftest import changed

NAMES = [
    "embed/token/embedding",
    "block_0/qkv/kernel",
    "block_0/qkv/bias",
    "block_10/qkv/kernel",
    "block_10/qkv/lora/q_proj/a",
    "head/norm",
]
CASES = {
    "a layer": ({"freeze": ["embed"]}, NAMES[1:]),
    "a part of each block": ({"freeze": ["block_*/qkv"]}, [NAMES[0], NAMES[5]]),
    "kernels": ({"freeze": ["*/kernel", "head"]}, [NAMES[0], NAMES[2], NAMES[4]]),
    "train_only": ({"train_only": ["block_0", "head/norm"]}, [NAMES[1], NAMES[2], NAMES[5]]),
    "adapters": ({"lora": {}}, [NAMES[4]]),
    "adapters and others": ({"lora": {}, "train_only": ["head"]}, NAMES[4:]),
    "adapters, some frozen": ({"lora": {}, "freeze": ["block_1*"]}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_patterns_name_parameters_layers_and_parts(case):
    keys, expected = CASES[case]
    is_trained = TuneConfig(**keys).trained()
    assert [name for name in NAMES if is_trained(name)] == expected


def built(tiny, **sections):
    config = changed(tiny, **sections)
    return build.build(config, Reporter(1, 1, "", Console(quiet=True)))


def model(width=8):
    """Return a model of the user's."""
    from flax import nnx

    return nnx.Sequential(nnx.Embed(256, width, rngs=nnx.Rngs(0)), nnx.Linear(width, 256, rngs=nnx.Rngs(1)))


OPTIONS = {
    "2BW": ({"train_only": ["head", "block_0/qkv/kernel"]}, {"clip_global_norm": 0.5, "ema_decay": 0.9}, {}),
    "adapters and a tied embedding": ({"lora": {}, "train_only": ["embed"], "base_dtype": "bfloat16"}, {}, {"model": {"tied": True}}),
    "adapters, a layer, experts": (
        {"lora": {}, "train_only": ["head"], "base_dtype": "bfloat16", "quantize": "int8"},
        {},
        {"model": {"experts": {"count": 2, "per_token": 1, "mlp_width": 8, "shared_mlp_width": 4}}, "plan": {"num_stages": 1}},
    ),
    "accumulated": ({"freeze": ["embed", "*/bias"]}, {"accumulate_batches": 2, "arguments": {"weight_decay": 0.1}}, {}),
    "a model of the user's": ({"freeze": ["layers.0"]}, {}, {"model": {"target": f"{__name__}:model"}, "plan": {"num_stages": 1}}),
}
SELDOM = dict.fromkeys(("adapters, a layer, experts", "adapters and a tied embedding", "accumulated", "2BW"), pytest.mark.exhaustive)


@pytest.mark.parametrize("case", [pytest.param(case, marks=SELDOM.get(case, ())) for case in OPTIONS])
def test_frozen_parameters_stay_as_they_are_to_the_bit(case, tiny):
    tune, optimizer, sections = OPTIONS[case]
    if "target" in sections.get("model", {}):
        tiny = tiny | {"model": {}}
    pipe, batches = built(tiny, tune=tune, optimizer=optimizer, **sections)
    state = pipe.init(jax.random.key(0), batches.like)
    start, is_trained = pipe.params(state), TuneConfig(**tune).trained()
    for t in range(3):
        state, _ = pipe.step(state, batches.train[t])
    state = pipe.drain(state)
    if "quantize" in tune:
        block = start["block_0"]
        assert block["qkv"]["kernel"]["codes"].dtype == block["experts"]["shared"]["contract"]["kernel"]["codes"].dtype == np.int8
        assert block["experts"]["router"]["kernel"].dtype == block["experts"]["expand"]["kernel"].dtype == "bfloat16"
    leaves = jax.tree_util.tree_leaves_with_path(pipe.params(state))
    for (path, after), before in zip(leaves, jax.tree.leaves(start), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        name = name.replace("layers/", "layers.").replace("head/token/", "embed/token/")  # of a tied embedding
        assert np.array_equal(after, before) != is_trained(name), name


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"freeze": ["blok_0"]}, "tune.freeze: no parameter or layer matches 'blok_0'; the most similar name is block_0"),
        ({"train_only": ["head/*", "block_0/qvk/kernel"]}, "tune.train_only: no .* matches 'block_0/qvk/kernel'; .* block_0/qkv/kernel"),
        (
            {"lora": {"targets": ["q_proj", "gate_proj"]}},
            "tune.lora.targets: .*, found gate_proj; the model has q_",
        ),
        (
            {"lora": {"targets": ["gate_proj"]}},
            "found gate_proj; the model has q_proj, k_proj, v_proj, o_proj, up_proj, down_proj",
        ),
        (
            {"lora": {"targets": ["up_proj"]}},
            "found up_proj; the model has q_proj, k_proj, v_proj, o_proj; routed experts have no adapters",
        ),
        (
            {"lora": {}, "quantize": "int8", "train_only": ["block_0"]},
            "tune.train_only: 'block_0' selects quantized kernels; select other parameters, or remove tune.quantize",
        ),
        ({"freeze": ["*"]}, "tune.freeze: expected patterns that leave some parameters trained, found all frozen; remove some patterns"),
    ],
)
def test_patterns_that_match_nothing_are_refused_with_the_nearest_name(tune, message, tiny):
    experts = {"count": 2, "per_token": 1, "mlp_width": 8} if "routed" in message else None
    with pytest.raises(InputError, match=message):
        built(tiny, tune=tune, model={"experts": experts})


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"freeze": ["a"], "train_only": ["b"]}, "freeze and train_only: expected one of them, found both"),
        ({"lora": {"targets": ["q_prj"]}}, "unknown layer 'q_prj'; did you mean 'q_proj'?"),
        ({"base_dtype": "bfloat16"}, "base_dtype has no effect without lora"),
        ({"quantize": "int8", "freeze": ["a"]}, "quantize has no effect without lora"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tune, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        TuneConfig(**tune)


def test_patterns_name_layers_of_a_model_that_was_cut_too():
    """Layers 'blocks.1' are slices of one array in the model's own tree."""

    def function(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["kernel"]), None), x, params["blocks"])
        return x @ params["head"]["kernel"]

    kernels = {"blocks": {"kernel": np.ones((3, 2, 2), np.float32)}, "head": {"kernel": np.ones((2, 2), np.float32)}}
    inputs = jax.ShapeDtypeStruct((1, 2), np.float32)
    stack = jpipe.LayerStack.from_function(function, kernels, inputs)
    params = {layer_id: spec.params for layer_id, spec in stack.specs(inputs).items()}
    config = OptimizerConfig(learning_rate=1.0, decay=["blocks.1/*"], arguments={"weight_decay": 0.5})
    rule = trains_part(optimizer(config, 5, params), TuneConfig(freeze=["blocks.2"]), params)
    layerwise, decayed = jpipe.model.find_layerwise(rule, params, tree=stack.tree), {}
    for layer_id, (tree, _) in stack.initial.items():
        zeros = jax.tree.map(jnp.zeros_like, tree)
        after, _ = layerwise.update(layer_id, zeros, layerwise.init(layer_id, tree), tree)
        decayed[layer_id] = float(after["kernel"][0, 0])
    assert stack.ids == ("blocks.0", "blocks.1", "blocks.2", "head")
    assert [layer_id for layer_id in stack.ids if layerwise.trained.excludes(layer_id)] == ["blocks.2"]
    assert decayed == {"blocks.0": 1.0, "blocks.1": 0.5, "blocks.2": 1.0, "head": 1.0}
