"""Optimizers that a pipeline supports are applied exactly, others are refused; clipping by the global norm."""

import re

import jax
import numpy as np
import optax
import pytest

from docs import optimizers
from jpipe import InputError, Tie
from jpipe.model._ties import Ties
from jpipe.model.layerwise._probe import find_layerwise
from jpipe_train.config.functions import optax_names

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
    """Scale the parameters down if their norm over all layers exceeds `radius`."""

    def update(updates, state, params):
        norm = optax.tree.norm(optax.apply_updates(params, updates))
        factor = jax.numpy.where(norm > radius, radius / norm, 1.0)
        return jax.tree.map(lambda p, u: (p + u) * factor - p, params, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


SPLIT = {
    "adam": optax.adam(RATE),
    "adamw, a tree as mask": optax.adamw(RATE, mask=NO_BIAS),
    "labels": optax.partition({"slow": optax.sgd(1e-3), "fast": optax.adam(RATE)}, KIND),
    "clipping of each layer": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(RATE)),
    "frozen": optax.set_to_zero(),
    "first layers frozen, by their place": optax.masked(
        optax.set_to_zero(), lambda params: {i: n < 2 for n, i in enumerate(sorted(params))}
    ),
}
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
    "normalize": optax.chain(optax.contrib.normalize(), optax.sgd(RATE)),
}
RATE_OF_ITS_OWN = "adamw with a learning-rate schedule"
WAYS_OUT = {
    "apply_if_finite": "skip_nonfinite of the pipeline",
    "skip_not_finite": "skip_nonfinite of the pipeline",
    **dict.fromkeys(("prodigy", "prodigy without NaN", "dadapt_adamw", "dadapt_adamw without NaN"), RATE_OF_ITS_OWN),
    "parameters on a ball": "leave out the part that uses all layers at once",
    "all in one": "leave out optax.flatten",
}


OFTEN = {"`adamw`", "`lion`", "`inject_hyperparams`"}
OFTEN |= {row.name for row in optimizers.ROWS if "mask" in row.name}
OFTEN |= {row.name for row in [row for row in optimizers.ROWS if row.instead][::3]}


def few_on_oldest(names):
    """Return the names as parameters, of which every fifth runs on the oldest Python and JAX, too."""
    return [pytest.param(name, marks=[pytest.mark.oldest] * (number % 5 == 0)) for number, name in enumerate(names)]


def marks_of(row) -> list[pytest.MarkDecorator]:
    """Return the marks of a row: `make test` runs some of the rows, `make test-slow` a twentieth of the others, `make test-all` all."""
    if row.name in OFTEN:
        return []
    return [pytest.mark.slow] if optimizers.ROWS.index(row) % 20 == 0 else pytest.mark.exhaustive


@pytest.mark.filterwarnings('ignore:"seed" is deprecated')
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=marks_of(row)) for row in optimizers.ROWS])
def test_a_row_of_the_tables_is_correct(row):
    """The optimizer gives equal updates layer by layer and on the whole model, or is refused with the text of the row."""
    assert optimizers.check(row) == ""


def test_the_tables_are_those_of_the_pages():
    pages = [page.read_text() for page in optimizers.PAGES]
    assert [optimizers.written(page) for page in pages] == pages, "run python -m docs.optimizers"
    text = "".join(pages)
    assert re.findall("<!-- table: (.+) -->", text) == ["optimizers", "learning rates", "wrappers and parts", "delayed gradients"]
    assert len({row.name for row in optimizers.ROWS}) == len(optimizers.ROWS)
    deprecated = {"optimistic_adam", "multi_transform"}
    assert {name for name in optax_names.optimizers() if f"`{name}`" not in text} <= deprecated


@pytest.mark.parametrize("name", SPLIT)
def test_optimizers_are_used_layer_by_layer_also_if_they_see_the_structure_of_the_model(name):
    find_layerwise(SPLIT[name], SPECS)


@pytest.mark.parametrize("name", few_on_oldest(WHOLE))
def test_optimizers_that_look_at_all_layers_are_refused_with_a_way_out(name):
    why = r"the (update|state) of layer '\w+' depends on layer '\w+'"
    instead = WAYS_OUT.get(name, "clip_global_norm of the pipeline")
    with pytest.raises(InputError, match=rf"optimizer: it cannot be applied layer by layer, .*: {why}; instead: {instead}"):
        find_layerwise(WHOLE[name], SPECS)


@pytest.mark.thinned(most=5)
@pytest.mark.parametrize("name", WHOLE)
def test_with_the_parameters_in_one_layer_there_is_nothing_to_split(name):
    if name != "clip some layers":
        find_layerwise(WHOLE[name], {"act": {}, "only": SPECS["block_0"]})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_dtypes_are_probed_too(dtype):
    specs = {layer_id: {"kernel": spec(8, 8, dtype=dtype)} for layer_id in "abc"}
    find_layerwise(SPLIT["adam"], specs)
    with pytest.raises(InputError, match="cannot be applied layer by layer"):
        find_layerwise(WHOLE["clip"], specs)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, r"optimizer: expected an optax.GradientTransformation, such as optax.adam\(1e-3\), found NoneType"),
        (optax.MultiSteps(optax.adam(RATE), 2), r"found MultiSteps; call its .gradient_transformation\(\)"),
        (optax.polyak_sgd(), "optimizer: it fails on parameters .* missing 1 required keyword-only argument: 'value'; .* .a loss value"),
        (
            optax.partition({"slow": optax.sgd(RATE)}, KIND),
            r"optimizer: it fails on parameters .*{'embed': params, …}: .* masks and labels given as",
        ),
    ],
)
def test_unsupported_optimizers_are_refused(optimizer, message):
    with pytest.raises(InputError, match=message):
        find_layerwise(optimizer, SPECS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_7": True}, "the model has no 'block_7'; the nearest is 'block_1'"),
        ({"head": {"kernel": True, "scal": True}}, "the model has no 'head/scal'; the nearest is 'head/scale'"),
        ({"head": {"kernel": True}}, "it lacks 'head/scale'; name all layers and parameters, or give a function"),
        ({"head": {"kernel": {"in": True}, "scale": True}}, "'head/kernel' is one array in the model; give one value for it"),
    ],
)
def test_a_mask_that_does_not_fit_the_model_is_refused_with_the_nearest_name(changes, message):
    mask = NO_BIAS | changes
    for rule in (
        optax.adamw(RATE, mask=mask),
        optax.chain(optax.clip(1.0), optax.masked(optax.sgd(RATE), mask)),
        optax.MultiSteps(optax.partition({True: optax.sgd(RATE), False: optax.set_to_zero()}, mask), 2).gradient_transformation(),
        optax.inject_hyperparams(optax.lion)(RATE, mask=mask),
    ):
        with pytest.raises(InputError) as caught:
            find_layerwise(rule, SPECS)
        assert str(caught.value) == f"optimizer: a mask (or labels) in the form of a tree does not fit the model: {message}"


def test_a_mask_lacks_a_layer_without_parameters():
    mask = {layer_id: True for layer_id in SPECS if layer_id != "act"}
    with pytest.raises(InputError, match="does not fit the model: it lacks 'act'; name all layers"):
        find_layerwise(optax.adamw(RATE, mask=mask), SPECS)


def test_a_shared_parameter_is_probed_separately_from_its_layers():
    """An optimizer that scales each layer by its norm gives other numbers if a parameter of the layer is updated alone."""

    def scaled(updates, state, params=None):
        norms = {layer_id: sum(abs(leaf).sum() for leaf in jax.tree.leaves(tree)) for layer_id, tree in updates.items()}
        return {layer_id: jax.tree.map(lambda g, n=1 + norms[layer_id]: g / n, tree) for layer_id, tree in updates.items()}, state

    by_layer, specs = optax.GradientTransformation(lambda params: (), scaled), {"a": {"w": spec(3), "b": spec(2)}, "c": {"w": spec(3)}}
    find_layerwise(by_layer, specs)
    with pytest.raises(InputError, match="optimizer: it cannot be applied layer by layer"):
        find_layerwise(by_layer, specs, ties=Ties([Tie(("a", "w"), ("c", "w"))], ["a", "c"]))


def label_of(*words):
    """Label a parameter "frozen" if its path contains one of these words, else "trained"."""

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "frozen" if any(word in name for word in words) else "trained"

    return lambda params: jax.tree_util.tree_map_with_path(label, params)


WARM_UP = optax.warmup_cosine_decay_schedule(0.0, RATE, 3, 20)
EMBEDDING = {layer_id: layer_id == "embed" for layer_id in SPECS}
EMBED = {"embed": (False,)}
MATRICES = {"embed": (False,), "block_0": (True, False), "block_1": (True, False), "head": (False, True)}


def freezing(trained, labels=None, frozen=None):
    return optax.partition({"trained": trained, "frozen": frozen or optax.set_to_zero()}, labels or label_of("embed"))


FROZEN = {
    "partition": (lambda: freezing(optax.adamw(RATE)), EMBED),
    "partition, single leaves": (lambda: freezing(optax.lamb(RATE), label_of("kernel", "table")), MATRICES),
    "partition, a tree of labels": (lambda: freezing(optax.adam(RATE), {i: "frozen" if i == "embed" else "trained" for i in SPECS}), EMBED),
    "warm-up": (lambda: freezing(optax.adam(WARM_UP)), EMBED),
    "clipped inside": (lambda: optax.chain(freezing(optax.sgd(RATE)), optax.clip(1.0)), EMBED),
    "freeze": (lambda: optax.chain(optax.adam(RATE), optax.transforms.freeze(EMBEDDING)), EMBED),
    "selective_transform": (lambda: optax.transforms.selective_transform(optax.adam(RATE), freeze_mask=EMBEDDING), EMBED),
    "set to zero behind": (lambda: optax.chain(optax.adamw(RATE), optax.masked(optax.set_to_zero(), EMBEDDING)), EMBED),
    "set to zero before": (lambda: optax.chain(optax.masked(optax.set_to_zero(), EMBEDDING), optax.adam(RATE)), EMBED),
    "a rate of zero": (lambda: freezing(optax.adam(RATE), frozen=optax.adam(0.0)), EMBED),
    "accumulated": (lambda: optax.MultiSteps(freezing(optax.adam(RATE)), 3).gradient_transformation(), EMBED),
    "accumulated inside": (lambda: freezing(optax.MultiSteps(optax.adam(WARM_UP), 9).gradient_transformation()), EMBED),
    "set to zero before weight decay": (lambda: optax.chain(optax.masked(optax.set_to_zero(), EMBEDDING), optax.adamw(RATE)), {}),
    "a schedule that begins with zero": (lambda: optax.sgd(WARM_UP), {}),
    "a schedule that is zero for long": (lambda: optax.sgd(optax.piecewise_interpolate_schedule("linear", 0.0, {200: 1.0})), {}),
    "a schedule of a layer": (lambda: freezing(optax.adam(RATE), frozen=optax.adam(optax.linear_schedule(0.0, RATE, 200))), {}),
    "few updates": (lambda: optax.MultiSteps(optax.sgd(RATE), 150).gradient_transformation(), {}),
    "a rate in the state, which may be set": (lambda: optax.inject_hyperparams(optax.sgd)(0.0), {}),
    "masked, the gradient itself": (
        lambda: optax.masked(optax.sgd(RATE), {i: not is_embedding for i, is_embedding in EMBEDDING.items()}),
        {},
    ),
}


SELDOM = {"partition, a tree of labels", "warm-up", "clipped inside", "set to zero behind", "a rate of zero", "accumulated inside"}
"""They are much like the others: only `make test-all` has them."""


@pytest.mark.parametrize(
    "name",
    [
        *few_on_oldest([name for name in FROZEN if name not in SELDOM]),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in sorted(SELDOM)),
    ],
)
def test_frozen_parameters_are_those_whose_update_is_always_zero(name):
    make, expected = FROZEN[name]
    assert find_layerwise(make(), SPECS).trained.chosen == expected


def test_a_frozen_parameter_that_other_parameters_use_is_not_left_out():
    def by_layer(updates, state, params=None):
        norms = {layer_id: sum(abs(leaf).sum() for leaf in jax.tree.leaves(tree)) for layer_id, tree in updates.items()}
        return {layer_id: jax.tree.map(lambda g, n=1 + norms[layer_id]: g / n, tree) for layer_id, tree in updates.items()}, state

    scaled = optax.GradientTransformation(lambda params: (), by_layer)
    freeze = optax.masked(optax.set_to_zero(), label_is_frozen("bias"))
    assert find_layerwise(optax.chain(scaled, freeze), SPECS).trained.is_all
    assert set(find_layerwise(optax.chain(freeze, scaled), SPECS).trained.chosen) == {"block_0", "block_1"}


def label_is_frozen(*words):
    return lambda params: jax.tree.map(lambda label: label == "frozen", label_of(*words)(params))


def test_a_label_function_that_needs_all_parameters_of_a_layer_gets_them():
    def labels(params):
        return {
            layer_id: {name: "frozen" if name == "bias" and "kernel" in tree and tree["kernel"].ndim == 2 else "trained" for name in tree}
            for layer_id, tree in params.items()
        }

    layerwise = find_layerwise(freezing(optax.sgd(RATE), labels), {"a": SPECS["block_0"], "b": SPECS["block_1"]})
    assert layerwise.trained.chosen == {"a": (False, True), "b": (False, True)}  # in the order of the leaves: bias, kernel


def test_the_refusal_names_where_the_norm_would_count_frozen_gradients():
    outside = optax.chain(optax.clip_by_global_norm(1.0), freezing(optax.sgd(RATE)))
    inside = freezing(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE)))
    advice = r"instead: clip_global_norm of the pipeline clips by the norm over all stages"
    more = (
        r"; the pipeline counts only the gradients of trained parameters, .* frozen ones, as in layer 'embed', .* inside optax\.partition"
    )
    with pytest.raises(InputError, match=f"{advice}{more}$"):
        find_layerwise(outside, SPECS)
    with pytest.raises(InputError, match=f"{advice}$"):
        find_layerwise(inside, SPECS)
