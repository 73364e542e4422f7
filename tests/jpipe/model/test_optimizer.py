"""Which optimizers a pipeline takes, that it applies those exactly, and clipping by the global norm."""

import chex
import jax
import numpy as np
import optax
import pytest

from jpipe import InputError
from jpipe.model._optimizer import find_layerwise

RATE = 1e-2


def spec(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


SPECS = {
    "embed": {"table": spec(50, 8)},
    "act": {},
    "block_0": {"kernel": spec(8, 8), "bias": spec(8)},
    "block_1": {"kernel": spec(8, 8), "bias": spec(8)},
    "head": {"kernel": spec(8, 50), "scale": spec()},
}
NO_BIAS = {layer_id: {name: name != "bias" for name in tree} for layer_id, tree in SPECS.items()}
KIND = {layer_id: dict.fromkeys(tree, "slow" if layer_id == "embed" else "fast") for layer_id, tree in SPECS.items()}


def on_a_ball(radius):
    """Scales the parameters down where their norm over all layers is above `radius`."""

    def update(updates, state, params):
        norm = optax.tree.norm(optax.apply_updates(params, updates))
        factor = jax.numpy.where(norm > radius, radius / norm, 1.0)
        return jax.tree.map(lambda p, u: (p + u) * factor - p, params, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


SPLIT = {
    "sgd": optax.sgd(RATE, momentum=0.9),
    "adam": optax.adam(RATE),
    "adamw, no mask": optax.adamw(RATE),
    "adamw, a function as mask": optax.adamw(RATE, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    "adamw, a tree as mask": optax.adamw(RATE, mask=NO_BIAS),
    "adamw, one word a layer as mask": optax.adamw(RATE, mask={layer_id: layer_id != "head" for layer_id in SPECS}),
    "labels": optax.partition({"slow": optax.sgd(1e-3), "fast": optax.adam(RATE)}, KIND),
    "lion": optax.lion(RATE),
    "lamb": optax.lamb(RATE),
    "lars": optax.lars(RATE),
    "adafactor": optax.adafactor(RATE),
    "muon": optax.contrib.muon(RATE),
    "schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, RATE, 3, 10)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "accumulation": optax.MultiSteps(optax.adam(RATE), 3).gradient_transformation(),
    "clipping of each layer": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(RATE)),
    "frozen": optax.set_to_zero(),
    "first layers frozen, by their place": optax.masked(
        optax.set_to_zero(), lambda params: {i: n < 2 for n, i in enumerate(sorted(params))}
    ),
}
NEED_STRUCTURE = {"adamw, a tree as mask", "adamw, one word a layer as mask", "labels", "first layers frozen, by their place"}
WHOLE = {
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)),
    "clip, seldom": optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(RATE)),
    "clip, never but for NaN": optax.chain(optax.clip_by_global_norm(1e12), optax.sgd(RATE)),
    "clip some layers": optax.masked(optax.clip_by_global_norm(1.0), {layer_id: "block" in layer_id for layer_id in SPECS}),
    "clip what was accumulated": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE)), 20
    ).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(RATE), 3),
    "skip_not_finite": optax.MultiSteps(optax.adam(RATE), 2, should_skip_update_fn=optax.skip_not_finite).gradient_transformation(),
    "prodigy": optax.contrib.prodigy(RATE),
    "prodigy without NaN": optax.chain(optax.zero_nans(), optax.contrib.prodigy(RATE)),
    "dadapt_adamw": optax.contrib.dadapt_adamw(RATE),
    "dadapt_adamw without NaN": optax.chain(optax.zero_nans(), optax.contrib.dadapt_adamw(RATE)),
    "clip what Adam made, above all that tiny arrays reach": optax.chain(
        optax.zero_nans(), optax.scale_by_adam(), optax.clip_by_global_norm(10.0), optax.scale(-RATE)
    ),
    "clip from step 50 on": optax.chain(
        optax.transforms.conditionally_transform(optax.clip_by_global_norm(1.0), lambda step: step > 50), optax.sgd(RATE)
    ),
    "clip what was accumulated over 101 steps": optax.chain(
        optax.zero_nans(),
        optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE)), 101).gradient_transformation(),
    ),
    "parameters on a ball": optax.chain(optax.zero_nans(), optax.adam(RATE), on_a_ball(100.0)),
    "all in one": optax.flatten(optax.adam(RATE)),
    "noise from one key": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(RATE)),
    "normalize": optax.chain(optax.contrib.normalize(), optax.sgd(RATE)),
}


@pytest.mark.thinned(most=6)
@pytest.mark.parametrize("name", SPLIT)
def test_optimizers_that_treat_every_layer_by_itself_are_taken(name):
    """Layer by layer, and in the structure of the whole model only where a tree needs that."""
    assert bool(find_layerwise(SPLIT[name], SPECS).blank) == (name in NEED_STRUCTURE)


@pytest.mark.newest
@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_look_at_all_layers_are_refused_with_a_way_out(name):
    why = r"(the update of layer '\w+' depends on layer '\w+'|after step \d+ layer '\w+' is not what it is without the others)"
    expected = rf"optimizer: it cannot be applied layer by layer, .*: {why}; leave out .* use clip_global_norm of the pipeline"
    with pytest.raises(InputError, match=expected):
        find_layerwise(WHOLE[name], SPECS)


@pytest.mark.parametrize("name", WHOLE)
def test_with_the_parameters_in_one_layer_there_is_nothing_to_split(name):
    if name != "clip some layers":
        find_layerwise(WHOLE[name], {"act": {}, "only": SPECS["block_0"]})


@pytest.mark.parametrize("name", ["adam", "first layers frozen, by their place"])
def test_of_many_layers_some_are_tried(name):
    specs = {f"layer_{n:02}": {"kernel": spec(8, 8)} for n in range(40)}
    assert bool(find_layerwise(SPLIT[name], specs).blank) == (name in NEED_STRUCTURE)
    with pytest.raises(InputError, match="the update of layer 'layer_00' depends on layer 'layer_39'"):
        find_layerwise(WHOLE["clip"], specs)


def test_the_trial_is_not_disturbed_by_debugging_modes():
    with jax.debug_nans(True), jax.transfer_guard("disallow"):
        find_layerwise(SPLIT["adam"], SPECS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_dtypes_are_probed_too(dtype):
    specs = {layer_id: {"kernel": spec(8, 8, dtype=dtype)} for layer_id in "abc"}
    find_layerwise(SPLIT["adam"], specs)
    with pytest.raises(InputError, match="cannot be applied layer by layer"):
        find_layerwise(WHOLE["clip"], specs)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, "optimizer: expected an optax.GradientTransformation, found NoneType, such as optax.adam"),
        (optax.MultiSteps(optax.adam(RATE), 2), r"found MultiSteps; call its .gradient_transformation\(\)"),
        (optax.polyak_sgd(), "optimizer: it fails on parameters .* missing 1 required keyword-only argument: 'value'; .* .a loss value"),
        (
            optax.adamw(RATE, mask={"embed": True}),
            r"optimizer: it fails on parameters .*{'embed': params, …}: .* masks and labels given as",
        ),
    ],
)
def test_what_cannot_be_an_optimizer_of_a_pipeline_is_refused(optimizer, message):
    with pytest.raises(InputError, match=message):
        find_layerwise(optimizer, SPECS)


@pytest.mark.thinned(most=4)
@pytest.mark.parametrize("name", SPLIT)
def test_layer_by_layer_gives_the_updates_of_the_whole(name):
    """Not the probe's own numbers: other shapes, other gradients, optax called as a user would call it."""
    generator = np.random.default_rng(5)
    params = jax.tree.map(lambda leaf: jax.numpy.asarray(generator.normal(size=leaf.shape), leaf.dtype), SPECS)
    layerwise = find_layerwise(SPLIT[name], SPECS)
    states = {layer_id: layerwise.init(layer_id, tree) for layer_id, tree in params.items()}
    whole = params
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        whole_state = SPLIT[name].init(params)
    for _ in range(4):
        gradients = jax.tree.map(lambda leaf: jax.numpy.asarray(generator.normal(size=leaf.shape), leaf.dtype), SPECS)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, whole_state = SPLIT[name].update(gradients, whole_state, whole)
            whole = optax.apply_updates(whole, updates)
        for layer_id, tree in params.items():
            params[layer_id], states[layer_id] = layerwise.update(layer_id, gradients[layer_id], states[layer_id], tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(whole, params)
    chex.assert_trees_all_close(whole, params, rtol=1e-5, atol=1e-6)
