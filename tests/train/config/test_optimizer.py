"""Optimizers by config: all of optax's, their decay masks and learning rates, and every mistake before anything runs."""

import inspect
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jpipe
from jpipe import InputError
from jpipe_train.assemble.build import check_per_stage, check_plan
from jpipe_train.assemble.optimizer import learning_rate, lr_schedule, optimizer
from jpipe_train.config.config import Config, OptimizerConfig
from jpipe_train.config.functions import optax_names
from tests.jpipe.running import check_equal
from tests.optimizers import lenient

PARAMS = {
    "block_0": {"qkv": {"kernel": jnp.full((4, 6), 2.0), "bias": jnp.ones(6)}, "norm": {"scale": jnp.ones(4)}},
    "block_1": {"qkv": {"kernel": jnp.full((4, 6), 2.0), "bias": jnp.ones(6)}, "norm": {"scale": jnp.ones(4)}},
    "head": {"kernel": jnp.full((6, 2), 2.0)},
}
NEEDED = {"contrib.dpsgd": {"l2_norm_clip": 1, "noise_multiplier": 0.1, "seed": 3}, "noisy_sgd": {"key": 0}}
MORE_THAN_GRADIENTS = {  # what a pipeline cannot give, so that jpipe.Pipeline refuses them
    "contrib.dpsgd": "expects `grads` to have a batch dimension",
    "contrib.momo": "'value'",
    "contrib.momo_adam": "'value'",
    "contrib.sophia": "obj_fn must be provided",
    "lbfgs": "'value_fn'",
    "polyak_sgd": "'value'",
}


def build(steps: int = 10, **keys) -> optax.GradientTransformation:
    with jax.numpy_dtype_promotion("standard"):
        return lenient(optimizer(OptimizerConfig(**keys), steps, PARAMS))


def update_of(rule: optax.GradientTransformation, gradients=PARAMS):
    return rule.update(gradients, rule.init(PARAMS), PARAMS)[0]


def decayed(**keys) -> set[str]:
    """Return the paths that change where all gradients are zero."""
    updates = update_of(build(**({"learning_rate": 1.0} | keys)), jax.tree.map(jnp.zeros_like, PARAMS))
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if np.any(leaf)}


def test_the_rule_finds_what_optax_calls_its_aliases():
    aliases = {
        name
        for name in dir(optax)
        if getattr(optax._src.alias, name, None) is getattr(optax, name)
        and "GradientTransformation" in str(getattr(inspect.unwrap(getattr(optax, name)), "__annotations__", {}).get("return", ""))
    }
    assert len(aliases) > 25
    names = set(optax_names.optimizers())
    partials = {"nadam", "nadamw"}  # of adam and adamw
    assert {name for name in names if "." not in name} - set(jpipe.optimizers.__all__) == aliases | partials
    assert {f"contrib.{name}" for name in ("muon", "prodigy", "schedule_free_sgd", "adopt", "ademamix")} <= names
    assert {"compensated_sgd", "compensated_adamw", "compensated_muon", "torch_nadam", "soap"} <= names
    transformations = {"contrib.schedule_free", "contrib.sam", "chain", "scale_by_adam", "scale_by_learning_rate", "clip", "ema"}
    assert not (transformations | {"per_stage", "scale_by_soap"}) & names


def test_the_rule_finds_the_schedules_of_optax():
    module = vars(optax.schedules)
    named = {name for name in module if (name.endswith("_schedule") or name == "exponential_decay") and name[0] != "_"}
    assert set(optax_names.schedules()) == named - {"sgdr_schedule"}  # whose argument is a list of those of others


@pytest.mark.thinned(most=3)
@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated", 'ignore:"seed" is deprecated')
@pytest.mark.parametrize("name", optax_names.optimizers())
def test_every_optimizer_of_optax_makes_an_update(name):
    rule = build(name=name, arguments=NEEDED.get(name, {}))
    if name in MORE_THAN_GRADIENTS:
        with pytest.raises((TypeError, ValueError), match=MORE_THAN_GRADIENTS[name]):
            update_of(rule)
        return
    state = rule.init(PARAMS)
    for _ in range(2):  # some need a first one to look around
        updates, state = rule.update(PARAMS, state, PARAMS)
    chex.assert_trees_all_equal_structs(updates, PARAMS)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    chex.assert_tree_all_finite(updates)


@pytest.mark.parametrize(
    ("keys", "by_hand"),
    [
        ({"name": "lamb", "arguments": {"b2": 0.95, "eps": 1}}, lambda: optax.lamb(1e-3, b2=0.95, eps=1.0, mask=MATRICES)),
        (
            {"name": "sgd", "learning_rate": 0.1, "arguments": {"momentum": 0.9, "nesterov": True, "accumulator_dtype": "bfloat16"}},
            lambda: optax.sgd(0.1, 0.9, True, jnp.bfloat16),
        ),
        ({"name": "adafactor", "arguments": {"clipping_threshold": None}}, lambda: optax.adafactor(1e-3, clipping_threshold=None)),
        (
            {
                "name": "contrib.muon",
                "learning_rate": 0.02,
                "arguments": {"ns_steps": 3, "ns_coeffs": [3.4, -4.7, 2.0], "preconditioning": "aol"},
            },
            lambda: optax.contrib.muon(0.02, ns_steps=3, ns_coeffs=(3.4, -4.7, 2.0), preconditioning="aol"),
        ),
        (
            {"name": "compensated_adamw", "arguments": {"b1": 0.8, "weight_decay": 1}},
            lambda: jpipe.optimizers.compensated_adamw(1e-3, 0.8, weight_decay=1.0, mask=MATRICES),
        ),
        (
            {"name": "torch_nadam", "learning_rate": 3e-4, "arguments": {"b1": 0.99, "decoupled_weight_decay": True}},
            lambda: jpipe.optimizers.torch_nadam(3e-4, 0.99, decoupled_weight_decay=True, mask=MATRICES),
        ),
        ({"name": "contrib.prodigy", "arguments": {"betas": [0.8, 0.9]}}, lambda: optax.contrib.prodigy(1.0, betas=(0.8, 0.9))),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_it_is_the_optimizer_that_python_would_build(keys, by_hand):
    with jax.numpy_dtype_promotion("standard"):
        expected = update_of(lenient(by_hand()))
    check_equal(update_of(build(**keys)), expected)


MATRICES = jax.tree.map(lambda leaf: leaf.ndim >= 2, PARAMS)
KERNELS = {"block_0/qkv/kernel", "block_1/qkv/kernel", "head/kernel"}


@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "adafactor", "lars"])
def test_matrices_decay_and_nothing_else(name):
    assert decayed(name=name, arguments={"weight_decay_rate" if name == "adafactor" else "weight_decay": 0.5}) == KERNELS


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*/kernel"], KERNELS),
        (["block_*/qkv/kernel"], KERNELS - {"head/kernel"}),
        (["block_1/*"], {"block_1/qkv/kernel", "block_1/qkv/bias", "block_1/norm/scale"}),
        (["block_*", "!*/bias", "!block_0/*"], {"block_1/qkv/kernel", "block_1/norm/scale"}),
        (["!head/*"], KERNELS - {"head/kernel"}),
    ],
)
def test_patterns_choose_what_decays(patterns, expected):
    assert decayed(decay=patterns, arguments={"weight_decay": 0.5}) == expected


def test_layers_of_other_processes_are_not_read():
    rule = build(decay=["*/kernel"], learning_rate=1.0, arguments={"weight_decay": 0.5})
    of_head = jax.tree.map(lambda _: optax.MaskedNode(), PARAMS) | {"head": PARAMS["head"]}
    zeros = jax.tree.map(jnp.zeros_like, of_head)
    updates, _ = rule.update(zeros, rule.init(of_head), of_head)
    chex.assert_trees_all_equal_structs(updates, of_head)
    np.testing.assert_allclose(updates["head"]["kernel"], -1.0)


def rates(steps: int, **keys) -> list[float]:
    """Return the learning rate of each update, measured by plain gradient descent."""
    rule, ones = build(steps, **({"name": "sgd"} | keys)), jax.tree.map(jnp.ones_like, PARAMS)
    state, values = rule.init(PARAMS), []
    for _ in range(steps + 1):
        updates, state = rule.update(ones, state, PARAMS)
        values.append(-float(updates["head"]["kernel"][0, 0]))
    return values


def test_the_learning_rate_warms_up_and_falls():
    values = rates(14, learning_rate=1.0, lr_schedule="cosine", warmup_steps=4)
    np.testing.assert_allclose(values[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert values[4:] == sorted(values[4:], reverse=True)
    np.testing.assert_allclose([values[9], values[14]], [0.55, 0.1], rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"learning_rate": 0.5}, [0.5, 0.5, 0.5]),
        (
            {"learning_rate": 0.8, "lr_schedule": "exponential_decay", "lr_arguments": {"transition_steps": 1, "decay_rate": 0.5}},
            [0.8, 0.4, 0.2],
        ),
        (
            {
                "learning_rate": 0.8,
                "warmup_steps": 1,
                "lr_schedule": "exponential_decay",
                "lr_arguments": {"transition_steps": 1, "decay_rate": 0.5},
            },
            [0.4, 0.8, 0.4],
        ),
        (
            {"learning_rate": 0.5, "lr_schedule": "piecewise_constant_schedule", "lr_arguments": {"boundaries_and_scales": {1: 0.1}}},
            [0.5, 0.05, 0.05],
        ),
        (
            {
                "learning_rate": 0.5,
                "lr_schedule": "warmup_cosine_decay_schedule",
                "lr_arguments": {"init_value": 0, "warmup_steps": 1, "decay_steps": 2},
            },
            [0.0, 0.5, 0.0],
        ),
        ({"name": "sign_sgd", "learning_rate": 0.5, "inject_hyperparams": True}, [0.5, 0.5, 0.5]),
        ({"name": "sgd", "learning_rate": 1.0, "inject_hyperparams": True, "lr_schedule": "cosine"}, [1.0, 0.55, 0.1]),
    ],
)
def test_learning_rates_of_optax(keys, expected):
    np.testing.assert_allclose(rates(2, **keys), expected, rtol=1e-6, atol=1e-7)


def rates_of(stage: int, delay: float, steps: int, **keys) -> list[float]:
    """Return the learning rate of each update of a stage, measured by plain gradient descent."""
    with jax.numpy_dtype_promotion("standard"):
        rule = lenient(optimizer(OptimizerConfig(name="sgd", **keys), steps, PARAMS))
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    state, values = rule.init(PARAMS), []
    for _ in range(steps):
        updates, state = rule.update(ones, state, PARAMS, stage=jnp.int32(stage), delay=jnp.float32(delay))
        values.append(-float(updates["head"]["kernel"][0, 0]))
    return values


def test_a_list_has_the_value_of_each_stage():
    keys = {"per_stage": {"learning_rate": [1.0, 0.5]}, "lr_schedule": "exponential_decay"}
    keys["lr_arguments"] = {"transition_steps": 1, "decay_rate": 0.5}
    np.testing.assert_allclose(rates_of(0, 0.0, 3, **keys), [1.0, 0.5, 0.25], rtol=1e-6)
    np.testing.assert_allclose(rates_of(1, 0.0, 3, **keys), [0.5, 0.25, 0.125], rtol=1e-6)
    momentum = {"per_stage": {"momentum": [0.0, 0.5]}, "learning_rate": 1.0}
    np.testing.assert_allclose(rates_of(0, 0.0, 3, **momentum), [1.0, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates_of(1, 0.0, 3, **momentum), [1.0, 1.5, 1.75], rtol=1e-6)


def test_the_rate_is_divided_by_the_delay_at_first():
    np.testing.assert_allclose(rates_of(0, 4.0, 4, learning_rate=1.0, lr_delay_steps=2), [0.25, 0.5, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates_of(0, 0.0, 2, learning_rate=1.0, lr_delay_steps=2), [1.0, 1.0], rtol=1e-6)


def test_the_delay_of_accumulated_batches_is_a_part_of_an_update():
    """Of the batches of an update only some see weights from before the last one."""
    keys = {"learning_rate": 1.0, "lr_delay_steps": 10**6, "accumulate_batches": 2}
    np.testing.assert_allclose(rates_of(0, 8.0, 4, **keys), [0.0, 0.25, 0.0, 0.25], rtol=1e-4)


def test_a_list_of_another_length_than_the_stages_is_refused():
    check_per_stage(jpipe.Plan.even("abc", 3, "pipedream_2bw", 4), {"learning_rate": [0.1, 0.2, 0.3]})
    message = "optimizer.per_stage: b1: expected one value for each of the 2 stages of the plan, found 3"
    with pytest.raises(InputError, match=re.escape(message)):
        check_per_stage(jpipe.Plan.even("ab", 2, "pipedream_2bw", 4), {"learning_rate": [0.1, 0.2], "b1": [0.1, 0.2, 0.3]})


def test_a_rate_beyond_float32_is_the_largest():
    assert lr_schedule(OptimizerConfig(), 10, 1.0)(0) == 1.0
    assert np.isfinite(rates(1, learning_rate=1e300)[0])


def test_hyperparameters_can_be_seen_in_the_state():
    arguments = {"b1": 0.8, "nesterov": True}
    rule = build(name="adamw", learning_rate=0.5, arguments=arguments, inject_hyperparams=True)
    assert {name: float(value) for name, value in rule.init(PARAMS).hyperparams.items()} == pytest.approx({"learning_rate": 0.5, "b1": 0.8})
    plain = update_of(build(name="adamw", learning_rate=0.5, arguments=arguments))
    chex.assert_trees_all_close(update_of(rule), plain, rtol=1e-5, strict=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"name": "adam", "arguments": {"b3": 0.9}},
            "optimizer.arguments: 'adam' has no argument 'b3'; its arguments, the most similar first: b1, b2, eps,",
        ),
        (
            {"arguments": {"learning_rate": 0.1}},
            "optimizer.arguments: 'learning_rate' of 'adamw' is optimizer.learning_rate; remove it here",
        ),
        ({"arguments": {"mask": True}}, "optimizer.arguments: 'mask' of 'adamw' is optimizer.decay; remove it here"),
        ({"name": "contrib.dpsgd"}, "optimizer.arguments: 'contrib.dpsgd' needs the argument 'l2_norm_clip'; add it"),
        ({"arguments": {"b1": "0.9"}}, "optimizer.arguments: 'b1' of 'adamw': expected a number, found '0.9'"),
        ({"arguments": {"b1": True}}, "optimizer.arguments: 'b1' of 'adamw': expected a number, found True"),
        ({"arguments": {"b1": None}}, "optimizer.arguments: 'b1' of 'adamw': expected a number, found None"),
        ({"arguments": {"b1": float("nan")}}, "optimizer.arguments: 'b1' of 'adamw': expected a number, found nan"),
        ({"arguments": {"nesterov": 1}}, "optimizer.arguments: 'nesterov' of 'adamw': expected true or false, found 1"),
        ({"arguments": {"mu_dtype": "bf16"}}, "'mu_dtype' of 'adamw': expected a dtype (float32, bfloat16, float16), found 'bf16'"),
        ({"name": "adafactor", "arguments": {"min_dim_size_to_factor": 1.5}}, "expected a whole number, found 1.5"),
        ({"name": "contrib.muon", "arguments": {"preconditioning": "x"}}, "expected one of frobenius, spectral, aol, schatten, found 'x'"),
        ({"name": "contrib.muon", "arguments": {"ns_coeffs": [1, "a"]}}, "expected a list of numbers, found [1, 'a']"),
        (
            {"name": "contrib.adopt", "arguments": {"clip_value_fn": "abs"}},
            "optimizer.arguments: 'clip_value_fn' of 'contrib.adopt' takes a Python object, which a config cannot express; "
            "write a function that calls contrib.adopt with this object, and name your function as module:function",
        ),
        ({"name": "contrib.muon", "arguments": {"muon_weight_dimension_numbers": 1}}, "'contrib.muon' takes a Python object"),
        ({"name": "lars", "arguments": {"trust_ratio_mask": True}}, "'trust_ratio_mask' of 'lars' takes a Python object"),
        ({"arguments": {"b1": 10**400}}, "optimizer.arguments: 'b1' of 'adamw': expected a number, found 1000000000000000"),
        *(
            (
                {"lr_schedule": "piecewise_constant_schedule", "lr_arguments": {"boundaries_and_scales": scales}},
                f"'boundaries_and_scales' of 'piecewise_constant_schedule': expected a mapping of steps to numbers, found {scales}",
            )
            for scales in ({"1": 0.1}, {1.5: 0.1}, {True: 0.1}, {1: "x"}, [1, 0.1], 3)
        ),
        (
            {"name": "lbfgs", "arguments": {"memory_size": 0}},
            "optimizer: 'lbfgs' does not accept its arguments: ValueError: memory_size must be >= 1; fix it",
        ),
        ({"decay": ["*/kernle"]}, "optimizer.decay: no parameter matches '*/kernle'; the most similar names are head/kernel, "),
        ({"decay": ["*", "!block_2/*"]}, "optimizer.decay: no parameter matches '!block_2/*'; the most similar names are block_"),
        (
            {"name": "adam", "decay": ["*"]},
            "optimizer.decay: 'adam' cannot select parameters for weight decay (it has none of the arguments mask and weight",
        ),
        (
            {"name": "polyak_sgd", "learning_rate": 1e-3},
            "optimizer.learning_rate: 'polyak_sgd' has no argument learning_rate; remove",
        ),
        (
            {"name": "polyak_sgd", "lr_schedule": "cosine"},
            "optimizer.lr_schedule: 'polyak_sgd' has no argument learning_rate; remove",
        ),
        (
            {"name": "rprop", "lr_schedule": "cosine"},
            "optimizer.lr_schedule: the learning rate of 'rprop' must be a number, not a schedule; use constant without warmup_steps, or",
        ),
        (
            {"per_stage": {"b3": [0.9]}},
            "optimizer.per_stage: 'adamw' has no argument 'b3'; its arguments, the most similar first: b1, b2, learning_rate",
        ),
        (
            {"per_stage": {"mask": [0.9]}},
            "optimizer.per_stage: 'mask' of 'adamw' is optimizer.decay; remove it here",
        ),
        (
            {"per_stage": {"nesterov": [1.0]}},
            "optimizer.per_stage: 'nesterov' of 'adamw' is not a number, so it cannot differ between stages; move it to",
        ),
        (
            {"per_stage": {"b1": [0.9]}, "arguments": {"b1": 0.9}},
            "optimizer.per_stage: expected b1 here or as optimizer.arguments.b1, found both; remove one of them",
        ),
        (
            {"per_stage": {"learning_rate": [0.9]}, "learning_rate": 0.9},
            "optimizer.per_stage: expected learning_rate here or as optimizer.learning_rate, found both; remove one of them",
        ),
        (
            {"per_stage": {"b1": [0.9]}, "inject_hyperparams": True},
            "optimizer.inject_hyperparams: it keeps one value for all stages; remove it, or remove optimizer.per_stage",
        ),
        (
            {"lr_arguments": {"alpha": 0.1}},
            "optimizer.lr_arguments: 'constant' takes none; remove lr_arguments, or name a schedule of optax",
        ),
        (
            {"lr_schedule": "exponential_decay", "lr_arguments": {"transition_steps": 1}},
            "optimizer.lr_arguments: 'exponential_decay' needs the argument 'decay_rate'; add it",
        ),
        (
            {"lr_schedule": "exponential_decay", "lr_arguments": {"decay_rat": 1}},
            "optimizer.lr_arguments: 'exponential_decay' has no argument 'decay_rat'; its arguments, the most similar first: decay_rate, ",
        ),
        (
            {"lr_schedule": "exponential_decay", "lr_arguments": {"init_value": 1}},
            "optimizer.lr_arguments: 'init_value' of 'exponential_decay' is optimizer.learning_rate; remove it here",
        ),
        (
            {"lr_schedule": "piecewise_interpolate_schedule", "lr_arguments": {"interpolate_type": "curly"}},
            "optimizer.lr_arguments: 'piecewise_interpolate_schedule' does not accept them: ValueError: `interpolate_type` must be",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(keys, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        build(**keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "adamm"}, "unknown optimizer 'adamm'; did you mean 'adam'?"),
        ({"name": "scale_by_adam"}, "unknown optimizer 'scale_by_adam'; did you mean"),
        ({"name": "muon"}, "unknown optimizer 'muon'; did you mean 'contrib.muon'?"),
        ({"name": "my module:f"}, "expected module:function, such as my_models:conv_net, found 'my module:f'"),
        ({"lr_schedule": "exponential"}, "unknown learning-rate schedule 'exponential'; did you mean 'exponential_decay'?"),
        ({"lr_schedule": "join_schedules"}, "unknown learning-rate schedule 'join_schedules'"),
        ({"per_stage": {"b1": []}}, "List should have at least 1 item"),
        ({"lr_delay_steps": 0}, "Input should be greater than or equal to 1"),
        ({"decay": []}, "List should have at least 1 item"),
        ({"weight_decay": 0.1}, "Extra inputs are not permitted"),
    ],
)
def test_a_name_that_optax_does_not_have_is_refused(keys, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OptimizerConfig(**keys)


USER_OPTIMIZERS = """
import optax

def mine(learning_rate, mask, momentum=0.0):
    return optax.chain(optax.add_decayed_weights(1.0, mask), optax.sgd(learning_rate, momentum))

def unrated():
    return optax.sign_sgd(0.25)

def nothing(learning_rate):
    pass
"""


@pytest.fixture
def user_optimizers(tmp_path, monkeypatch):
    (tmp_path / "user_optimizers.py").write_text(USER_OPTIMIZERS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("user_optimizers")
def test_a_users_optimizer():
    keys = {"name": "user_optimizers:mine", "learning_rate": 0.5, "arguments": {"momentum": 0.5}}
    assert decayed(**keys | {"decay": ["head/*"]}) == {"head/kernel"}
    np.testing.assert_allclose(rates(1, **keys), [1.5, 2.25])  # the gradient 1, the weight 2; then the momentum
    np.testing.assert_allclose(rates(1, name="user_optimizers:unrated"), 0.25)
    del keys["arguments"]
    np.testing.assert_allclose(rates(1, **keys, per_stage={"momentum": [0.5]}), [1.5, 2.25])


@pytest.mark.usefixtures("user_optimizers")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "user_optimizers:mime"}, "optimizer.name: the module 'user_optimizers' has no function 'mime'; did you mean 'mine'?"),
        ({"name": "user_optimizers:unrated", "learning_rate": 0.1}, "optimizer.learning_rate: 'user_optimizers:unrated' has no argument"),
        (
            {"name": "user_optimizers:nothing"},
            "expected 'user_optimizers:nothing' to return an optax.GradientTransformation, found NoneType",
        ),
        (
            {"name": "user_optimizers:mine", "arguments": {"mometum": 1}},
            "has no argument 'mometum'; its arguments, the most similar first: momentum",
        ),
    ],
)
def test_a_mistake_in_a_users_optimizer(keys, message):
    with pytest.raises(InputError, match=re.escape(message)):
        build(**keys)


@pytest.mark.exhaustive
def test_two_batches_accumulated_are_one_of_twice_the_size():
    keys = {"name": "sgd", "learning_rate": 0.5, "lr_schedule": "cosine", "arguments": {"momentum": 0.9}}
    rule, whole = build(8, accumulate_batches=2, **keys), build(4, **keys)
    generator = np.random.default_rng(0)
    params = accumulated = jax.tree.map(jnp.asarray, PARAMS)
    state, state_of_whole = rule.init(params), whole.init(params)
    for _ in range(4):
        both = [jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), jnp.float32), PARAMS) for _ in range(2)]
        for gradient in both:
            updates, state = rule.update(gradient, state, accumulated)
            accumulated = optax.apply_updates(accumulated, updates)
        updates, state_of_whole = whole.update(jax.tree.map(lambda a, b: (a + b) / 2, *both), state_of_whole, params)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(accumulated, params, rtol=1e-5, atol=1e-6)


def test_the_rate_that_is_logged_is_that_of_the_update():
    config = OptimizerConfig(name="sgd", learning_rate=1.0, lr_schedule="cosine", warmup_steps=1, accumulate_batches=2)
    rate, every = learning_rate(config, 7), learning_rate(config.model_copy(update={"accumulate_batches": 1}), 3)
    assert [rate(batch) for batch in range(7)] == [every(0), every(0), every(1), every(1), every(2), every(2), every(3)]
    assert every(0) == 0.5
    assert learning_rate(OptimizerConfig(name="sgd", per_stage={"learning_rate": [0.1, 0.2]}), 7) is None


def test_batches_are_not_accumulated_where_stages_update_several_times_in_one():
    plan = jpipe.Plan.even("ab", 2, "pipedream", 4, replicas=[2, 1], update_every="replicas")
    config = Config(train={"batch_size": 8, "steps": 2})
    check_plan(config, plan)
    with pytest.raises(
        InputError, match=r"^accumulate_batches: expected plan\.update_every 'batch' with 2, found 'replicas': stages update"
    ):
        check_plan(config.model_copy(update={"optimizer": OptimizerConfig(accumulate_batches=2)}), plan)
