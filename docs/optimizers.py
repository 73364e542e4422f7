"""Test which optimizers of optax a pipeline supports, and write the tables of two pages: `python -m docs.optimizers`."""

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import jpipe
from jpipe import InputError
from jpipe.model import find_layerwise

PAGES = tuple(Path(__file__).parent / "how-to" / name for name in ("optimizers.md", "delayed-gradients.md"))
RATE = 1e-2
STEPS = 4
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "embed": {"table": (5, 4)},
    "act": {},
    "block_0": {"kernel": (4, 4), "bias": (4,)},
    "block_1": {"kernel": (4, 4), "bias": (4,)},
    "head": {"kernel": (4, 5)},
}
"""Of the parameters of a small model, by layer id."""
STACKED: dict[str, dict[str, tuple[int, ...]]] = {
    "embed": {"table": (5, 4)},
    "blocks": {"kernel": (2, 4, 4), "bias": (2, 4)},
    "head": {"kernel": (4, 5)},
}
"""Of the parameters of a small model with blocks that a loop stacks in one array, in the model's own tree."""
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]


def _matrices(shapes: Shapes) -> dict[str, dict[str, bool]]:
    return {module: {name: len(shape) > 1 for name, shape in arrays.items()} for module, arrays in shapes.items()}


def _embedding(shapes: Shapes) -> dict[str, bool]:
    return {module: module == "embed" for module in shapes}


def _parts(shapes: Shapes) -> dict[str, str]:
    return {module: "slow" if module == "embed" else "fast" for module in shapes}


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        name: of the optimizer, in Markdown.
        make: returns it.
        instead: what to use in place of one that does not work, as its error names it; "" for one that works layer by layer.
        remark: what else to know.
        in_structure: whether `make` takes the shapes of the whole model, for masks and labels in its structure.
        in_slices: whether it works for blocks that are stacked in one array.
    """

    name: str
    make: Callable[..., Any]
    instead: str = ""
    remark: str = ""
    in_structure: bool = False
    in_slices: bool = True


def _by_name(module: Any, prefix: str, names: str, instead: str = "", remark: str = "", *, in_slices: bool = True) -> list[Row]:
    """Return the optimizers of a module that take a learning rate."""
    return [
        Row(f"`{prefix}{name}`", functools.partial(getattr(module, name), learning_rate=RATE), instead, remark, in_slices=in_slices)
        for name in names.split()
    ]


def _noise_per_layer(shapes: Shapes) -> Any:
    noises = {module: optax.add_noise(0.1, 0.55, jax.random.key(n)) for n, module in enumerate(shapes)}
    return optax.chain(optax.partition(noises, {module: module for module in shapes}), optax.sgd(RATE))


def _kernels(params: Any) -> Any:
    """Return for each kernel, or stack of kernels, its dims for Muon, and None for other parameters."""

    def dims(path: Any, leaf: Any) -> Any:
        return optax.contrib.MuonDimensionNumbers((leaf.ndim - 2,), (leaf.ndim - 1,)) if path[-1].key == "kernel" else None

    return jax.tree_util.tree_map_with_path(dims, params)


def _before_sgd(transformation: Any) -> Any:
    return optax.chain(transformation, optax.sgd(RATE))


def _scheduled(schedule: Any) -> Callable[[], Any]:
    return lambda: optax.adam(schedule)


def _skipping(function: Any) -> Any:
    return optax.MultiSteps(optax.adam(RATE), 2, should_skip_update_fn=function).gradient_transformation()


_RATE = "`adamw` with a learning-rate schedule, or `schedule_free_adamw`"
_NOISE = "the noise that optax gives the whole model; each layer computes its own"
_CLIP = "`clip_global_norm` of the pipeline"
_SKIP = "`skip_nonfinite` of the pipeline"
_NORMS = f"{_CLIP}, or `lamb` or `lars`"
_COMPENSATED = "momentum by the delay of each stage; the state of the optimizer without it"
_FROZEN = "[frozen parameters](#frozen-parameters) cost nothing"

OPTIMIZERS = (
    Row("`sgd`", lambda: optax.sgd(RATE)),
    Row("`sgd` with momentum", lambda: optax.sgd(RATE, 0.9)),
    Row("`sgd` with Nesterov momentum", lambda: optax.sgd(RATE, 0.9, nesterov=True)),
    *_by_name(optax, "", "adam adamw nadam nadamw radam amsgrad adamax adamaxw adabelief adan yogi lion"),
    *_by_name(optax, "", "lamb lars fromage novograd sm3", in_slices=False),
    *_by_name(optax, "", "adafactor", remark="moments are factored matrix by matrix", in_slices=False),
    *_by_name(optax.contrib, "contrib.", "muon", remark="matrices by Muon, other parameters by Adam", in_slices=False),
    Row(
        "`contrib.muon` with `muon_weight_dimension_numbers`",
        lambda: optax.contrib.muon(RATE, muon_weight_dimension_numbers=_kernels),
        remark="parameters for which the function returns None by Adam",
    ),
    *_by_name(optax, "", "adadelta adagrad rmsprop rprop sign_sgd signum"),
    *_by_name(optax, "", "optimistic_adam_v2 optimistic_gradient_descent"),
    *_by_name(optax.contrib, "contrib.", "acprop ademamix simplified_ademamix adopt cocob madgrad"),
    *_by_name(
        optax.contrib,
        "contrib.",
        "schedule_free_sgd schedule_free_adamw",
        remark="`evaluate` has the weights of training, not `schedule_free_eval_params`",
    ),
    Row(
        "`contrib.sam`",
        lambda: optax.contrib.sam(optax.sgd(RATE), optax.sgd(0.1)),
        remark="every second update is an adversarial step; in between `evaluate` has its weights",
    ),
    Row(
        "`contrib.sam` with `contrib.normalize`",
        lambda: optax.contrib.sam(optax.sgd(RATE), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))),
        _NORMS,
    ),
    *_by_name(optax.contrib, "contrib.", "prodigy dadapt_adamw dog dowg", _RATE, "the step size is computed from all gradients"),
    Row("`contrib.mechanize`", lambda: optax.contrib.mechanize(optax.sgd(RATE)), _RATE, "the step size is computed from all gradients"),
    *_by_name(optax, "", "lbfgs", _RATE, "the update needs the loss as a value or as a function"),
    Row("`polyak_sgd`", optax.polyak_sgd, _RATE, "the update needs the loss as a value or as a function"),
    *_by_name(optax.contrib, "contrib.", "momo momo_adam sophia", _RATE, "the update needs the loss as a value or as a function"),
    *_by_name(optax.contrib, "contrib.", "galore", in_slices=False),
    Row("`noisy_sgd`", lambda: optax.noisy_sgd(RATE, key=0), remark=_NOISE, in_slices=False),
    Row(
        "`contrib.dpsgd`",
        lambda: optax.contrib.dpsgd(RATE, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0),
        "leave it out",
        "a pipeline has no gradients of single examples",
    ),
)

DELAYED = (
    *_by_name(
        jpipe.optimizers,
        "",
        "compensated_sgd compensated_adam compensated_adamw",
        remark=_COMPENSATED,
    ),
    *_by_name(jpipe.optimizers, "", "compensated_muon", remark=_COMPENSATED, in_slices=False),
    Row(
        "`predict_delay` after `adam`",
        lambda: optax.chain(optax.adam(RATE), jpipe.optimizers.predict_delay()),
        remark="one array for each parameter",
    ),
    *_by_name(jpipe.optimizers, "", "torch_nadam", remark="the state of Adam, and one number"),
    Row(
        "`soap`",
        lambda: jpipe.optimizers.soap(RATE, precondition_frequency=2),
        remark="the state of Adam, and of a matrix m × n 2·(m² + n²) numbers more",
        in_slices=False,
    ),
    Row(
        "`scale_by_delay` after `adam`, `per_stage` with `adam`",
        lambda: optax.chain(jpipe.optimizers.per_stage(optax.adam, learning_rate=[RATE, 2 * RATE]), jpipe.optimizers.scale_by_delay(9)),
        remark="one number more",
    ),
)

SCHEDULES = (
    Row("`constant_schedule`", _scheduled(optax.constant_schedule(RATE))),
    Row("`linear_schedule`", _scheduled(optax.linear_schedule(RATE, 0.0, 10))),
    Row("`polynomial_schedule`", _scheduled(optax.polynomial_schedule(RATE, 0.0, 2, 10))),
    Row("`exponential_decay`", _scheduled(optax.exponential_decay(RATE, 2, 0.5))),
    Row("`cosine_decay_schedule`", _scheduled(optax.cosine_decay_schedule(RATE, 10))),
    Row("`piecewise_constant_schedule`", _scheduled(optax.piecewise_constant_schedule(RATE, {2: 0.1}))),
    Row("`piecewise_interpolate_schedule`", _scheduled(optax.piecewise_interpolate_schedule("linear", RATE, {2: 0.1}))),
    Row("`warmup_constant_schedule`", _scheduled(optax.warmup_constant_schedule(0.0, RATE, 2))),
    Row("`warmup_cosine_decay_schedule`", _scheduled(optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10))),
    Row("`warmup_exponential_decay_schedule`", _scheduled(optax.warmup_exponential_decay_schedule(0.0, RATE, 2, 10, 0.5))),
    Row("`linear_onecycle_schedule`", _scheduled(optax.linear_onecycle_schedule(10, RATE))),
    Row("`cosine_onecycle_schedule`", _scheduled(optax.cosine_onecycle_schedule(10, RATE))),
    Row(
        "`sgdr_schedule`",
        _scheduled(optax.sgdr_schedule([{"init_value": 0.0, "peak_value": RATE, "decay_steps": 4, "warmup_steps": 1}] * 2)),
    ),
    Row("`join_schedules`", _scheduled(optax.join_schedules([optax.constant_schedule(RATE), optax.constant_schedule(0.0)], [2]))),
    Row("`inject_hyperparams`", lambda: optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(RATE, 10), weight_decay=0.1)),
    Row(
        "`contrib.reduce_on_plateau`",
        lambda: optax.chain(optax.sgd(RATE), optax.contrib.reduce_on_plateau()),
        _RATE,
        "the update needs the loss as a value or as a function",
    ),
)

WRAPPERS = (
    Row("a mask that is a function", lambda: optax.adamw(RATE, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))),
    Row("a mask that is a tree", lambda shapes: optax.adamw(RATE, mask=_matrices(shapes)), in_structure=True),
    Row("a mask with one value for each layer", lambda shapes: optax.adamw(RATE, mask=_embedding(shapes)), in_structure=True),
    Row(
        "`partition` (`multi_transform`)",
        lambda shapes: optax.partition({"slow": optax.sgd(1e-3), "fast": optax.adam(RATE)}, _parts(shapes)),
        in_structure=True,
    ),
    Row("`named_chain`", lambda: optax.named_chain(("adam", optax.scale_by_adam()), ("rate", optax.scale(-RATE)))),
    Row(
        "`selective_transform`",
        lambda shapes: optax.selective_transform(optax.adam(RATE), freeze_mask=_embedding(shapes)),
        remark=_FROZEN,
        in_structure=True,
    ),
    Row("`freeze`", lambda shapes: optax.chain(optax.adam(RATE), optax.freeze(_embedding(shapes))), remark=_FROZEN, in_structure=True),
    Row(
        "`partition` with `set_to_zero`",
        lambda shapes: optax.partition({"slow": optax.set_to_zero(), "fast": optax.adam(RATE)}, _parts(shapes)),
        remark=_FROZEN,
        in_structure=True,
    ),
    Row(
        "`MultiSteps(…).gradient_transformation()`",
        lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
        remark="accumulates over batches; in a config `accumulate_batches`",
    ),
    Row("`MultiSteps(…)` itself", lambda: optax.MultiSteps(optax.adam(RATE), 2), "its `.gradient_transformation()`"),
    Row("`apply_every`", lambda: _before_sgd(optax.apply_every(2))),
    Row("`MultiSteps` with `skip_not_finite`", lambda: _skipping(optax.skip_not_finite), _SKIP),
    Row(
        "`MultiSteps` with `skip_large_updates`",
        lambda: _skipping(functools.partial(optax.skip_large_updates, max_squared_norm=1.0)),
        _CLIP,
    ),
    Row("`apply_if_finite`", lambda: optax.apply_if_finite(optax.adam(RATE), 3), _SKIP),
    Row("`zero_nans`", lambda: _before_sgd(optax.zero_nans()), remark="sets single numbers to zero, and skips no batch"),
    Row("`clip_by_global_norm`", lambda: _before_sgd(optax.clip_by_global_norm(1.0)), _CLIP),
    Row("`normalize_by_update_norm`", lambda: _before_sgd(optax.normalize_by_update_norm()), _NORMS),
    Row("`contrib.normalize`", lambda: _before_sgd(optax.contrib.normalize()), _NORMS),
    Row("`clip`", lambda: _before_sgd(optax.clip(0.1))),
    Row("`clip_by_block_rms`", lambda: _before_sgd(optax.clip_by_block_rms(0.1)), in_slices=False),
    Row("`adaptive_grad_clip`", lambda: _before_sgd(optax.adaptive_grad_clip(0.1)), in_slices=False),
    Row("`centralize`", lambda: _before_sgd(optax.centralize())),
    Row("`add_decayed_weights`", lambda: _before_sgd(optax.add_decayed_weights(0.1))),
    Row("`keep_params_nonnegative`", lambda: optax.chain(optax.sgd(RATE), optax.keep_params_nonnegative())),
    Row("`add_noise`", lambda: _before_sgd(optax.add_noise(0.1, 0.55, jax.random.key(0))), remark=_NOISE, in_slices=False),
    Row("an `add_noise` for each layer", _noise_per_layer, in_structure=True, in_slices=False),
    Row("`ema`", lambda: _before_sgd(optax.ema(0.9)), remark="averages gradients; for weights use `ema_decay` of the pipeline"),
    Row("`lookahead`", lambda: optax.lookahead(optax.sgd(RATE), 5, 0.5), "`ema_decay` of the pipeline"),
    Row(
        "`scale_by_backtracking_linesearch`",
        lambda: optax.chain(optax.sgd(RATE), optax.scale_by_backtracking_linesearch(10)),
        _RATE,
        "the update needs the loss as a value or as a function",
    ),
    Row("`flatten`", lambda: optax.flatten(optax.adam(RATE)), "leave it out"),
    Row("`monitor`", lambda: _before_sgd(optax.monitor({"norm": optax.tree.norm})), f"leave it out; with {_CLIP} a step returns the norm"),
)

TABLES = {"optimizers": OPTIMIZERS, "delayed gradients": DELAYED, "learning rates": SCHEDULES, "wrappers and parts": WRAPPERS}
ROWS = tuple(itertools.chain(*TABLES.values()))


def check(row: Row) -> str:
    """Return how a row is wrong, or "".

    A supported optimizer gives the same numbers layer by layer as on the whole model; an unsupported one raises an error. The same holds
    for a model with stacked blocks. In float64 the numbers are equal to rounding, if `jax_enable_x64` is set.
    """
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    specs = {i: {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in layer.items()} for i, layer in SHAPES.items()}
    rule = _made(row, SHAPES)
    try:
        layerwise = find_layerwise(rule, specs)
    except InputError as error:
        missing = [word for word in re.findall(r"`\.?(\w+)", row.instead) if word not in str(error)]
        return f"{row.name} raises: {error}" if not row.instead else f"{missing} is not in: {error}" if missing else ""
    if row.instead:
        return f"{row.name} works"
    if _difference(rule, layerwise, specs, dict, dict) >= 1e-12:
        return f"{row.name} gives other numbers layer by layer"
    return _check_stacked(row, dtype)


def _check_stacked(row: Row, dtype: Any) -> str:
    """Return how a row is wrong for a model with stacked blocks, or ""."""
    stack, specs = _stacked(dtype)
    rule = _made(row, STACKED)
    try:
        layerwise = find_layerwise(rule, {i: spec.params for i, spec in stack.specs(_inputs(dtype)).items()}, tree=stack.tree)
    except InputError as error:
        return f"{row.name} raises for stacked blocks: {error}" if row.in_slices else ""
    if not row.in_slices:
        return f"{row.name} works for stacked blocks"
    difference = _difference(
        rule, layerwise, specs, lambda tree: {i: params for i, (params, _) in stack.by_layer(tree).items()}, stack.whole_params
    )
    return "" if difference < 1e-12 else f"{row.name} gives other numbers for stacked blocks"


def _made(row: Row, shapes: Shapes) -> Any:
    return row.make(shapes) if row.in_structure else row.make()


def _inputs(dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((2, 5), dtype)


@functools.cache
def _stacked(dtype: Any) -> tuple[jpipe.LayerStack, Any]:
    """Return a model with stacked blocks, cut into layers, and the specs of its own tree."""

    def function(params: Any, x: Any) -> Any:
        def block(x: Any, block: Any) -> Any:
            return x + jnp.tanh(x @ block["kernel"] + block["bias"][None]), None

        x, _ = jax.lax.scan(block, x @ params["embed"]["table"], params["blocks"])
        return x @ params["head"]["kernel"]

    specs = {i: {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in arrays.items()} for i, arrays in STACKED.items()}
    return jpipe.LayerStack.from_function(function, specs, _inputs(dtype)), specs


def _difference(rule: Any, layerwise: Any, specs: Any, split: Callable[[Any], Any], joined: Callable[[Any], Any]) -> float:
    """Return the largest difference between the parameters after some updates of the whole model and of its layers.

    Args:
        rule: the optimizer.
        layerwise: the optimizer for one layer at a time.
        specs: of the tree of parameters.
        split: such a tree -> trees by layer id.
        joined: the way back.
    """
    generator = np.random.default_rng(5)

    def random_tree() -> Any:
        return jax.tree.map(lambda spec: jnp.asarray(generator.normal(size=spec.shape), spec.dtype), specs)

    whole = random_tree()
    layers, trained = split(whole), layerwise.trained
    states = {layer_id: layerwise.init(layer_id, trained.of(layer_id, params)) for layer_id, params in layers.items()}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state, update = rule.init(whole), optax.with_extra_args_support(rule).update
        for step in range(STEPS):
            gradients, position = random_tree(), {"delay": jnp.float32(step / 2), "stage": jnp.int32(step % 2)}
            names = layerwise.of_model.traced.position
            updates, state = update(gradients, state, whole, **{name: position[name] for name in names})
            whole, of_layers = optax.apply_updates(whole, updates), split(gradients)
            for layer_id, params in layers.items():
                parts = (trained.of(layer_id, tree) for tree in (of_layers[layer_id], params))
                new, states[layer_id] = layerwise.update(layer_id, next(parts), states[layer_id], next(parts), position=position)
                layers[layer_id] = trained.filled(layer_id, new, params)
    differences = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), whole, joined(layers))
    return max(jax.tree.leaves(differences))


def table(rows: tuple[Row, ...]) -> str:
    """Format the table in Markdown; neighbours with equal results share a line."""
    lines = [
        f"| {'jpipe.optimizers' if rows is DELAYED else 'optax'} | layer by layer | stacked blocks | instead | remark |",
        "|---|---|---|---|---|",
    ]
    for (instead, remark, in_slices), group in itertools.groupby(rows, lambda row: (row.instead, row.remark, row.in_slices)):
        names = ", ".join(row.name for row in group)
        cells = [names, "no" if instead else "yes", "" if instead else "yes" if in_slices else "no", instead, remark]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the page with its tables updated."""
    for name in re.findall("^<!-- table: (.+) -->$", page, re.MULTILINE):
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, after = page.split(begin)
        page = f"{before}{begin}{table(TABLES[name])}\n{end}{after.partition(end)[2]}"
    return page


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if wrong := [words for row in ROWS if (words := check(row))]:
        raise SystemExit("\n".join(wrong))
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
