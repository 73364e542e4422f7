"""The parameters that the section `tune` freezes, and the optimizer that leaves them as they are."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jpipe import InputError
from jpipe_lm.models.lora import is_of_adapter, is_quantized, parts_of
from jpipe_train.config.tune_config import TARGETS, TuneConfig, matches_any

Tree = Any


def trains_part(rule: optax.GradientTransformation, config: TuneConfig, params: Mapping[str, Tree]) -> optax.GradientTransformation:
    """Return an optimizer that changes only the trained parameters, or `rule` itself if all are trained.

    Args:
        rule: the optimizer of the trained parameters.
        config: the section `tune`.
        params: shapes and dtypes of the model's parameters, by layer id.

    Raises:
        InputError: a pattern matches no parameter, or none is trained.
    """
    is_trained = trained(config)
    if is_trained is None:
        return rule
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(dict(params))]
    for key, patterns in (("freeze", config.freeze), ("train_only", config.train_only)):
        _check_patterns(key, patterns, names)
    for pattern in config.train_only if config.quantize is not None else ():
        if any(is_quantized(name) and matches_any(name, [pattern]) for name in names):
            raise InputError(f"tune.train_only: '{pattern}' names quantized kernels; name other parameters, or leave out tune.quantize")
    for target in config.lora.targets or () if config.lora is not None else ():
        if not any(f"/lora/{target}/" in name for name in names):
            parts = {part for name in names for part in parts_of(name)}
            has = [name for name in TARGETS if name in parts]
            others = f"it has {', '.join(has)}" if has else "it has none of these layers"
            others += "; routed experts have no adapters" if any("/experts/" in name for name in names) else ""
            raise InputError(f"tune.lora.targets: expected layers that the model has, found {target}, which it lacks; {others}")
    if not any(map(is_trained, names)):
        key = "freeze" if config.freeze else "lora.targets"
        raise InputError(f"tune.{key}: expected that some parameters are trained, found that all are frozen; leave some out")

    labels = jax.tree_util.tree_map_with_path(lambda path, _: "trained" if is_trained(_name(path)) else "frozen", dict(params))
    transforms = {"trained": rule, "frozen": optax.set_to_zero()}
    # It fails on the own tree of a model that was cut into layers, so it gets these layers instead, as the names are theirs.
    return optax.partition(transforms, lambda tree: {layer_id: labels[layer_id] for layer_id in tree})


def trained(config: TuneConfig) -> Callable[[str], bool] | None:
    """Return a function that tells by a parameter's name whether it is trained; None if all are."""
    if config.lora is not None:
        return lambda name: matches_any(name, config.train_only) or (is_of_adapter(name) and not matches_any(name, config.freeze))
    if config.freeze:
        return lambda name: not matches_any(name, config.freeze)
    return (lambda name: matches_any(name, config.train_only)) if config.train_only else None


def words(config: TuneConfig, params: Mapping[str, Tree], *, random: bool = False) -> str | None:
    """Describe how many parameters are trained; None if all are.

    Args:
        config: the section `tune`.
        params: shapes and dtypes of the model's parameters, by layer id; of shared ones only the first place.
        random: whether the run begins with random parameters.
    """
    if (is_trained := trained(config)) is None:
        return None
    chosen, every = jax.tree.leaves(part_of(params, is_trained)), jax.tree.leaves(dict(params))
    frozen = sum(leaf.size * leaf.dtype.itemsize for leaf in every) - sum(leaf.size * leaf.dtype.itemsize for leaf in chosen)
    begin = "; these are random, because warm_start.file is not set" if random and config.lora is not None else ""
    return f"tune: {sum(leaf.size for leaf in chosen):,} parameters are trained; {frozen:,} bytes of others stay as they are{begin}"


def part_of(specs: Mapping[str, Tree], is_trained: Callable[[str], bool]) -> dict[str, Tree]:
    """Return parameters by layer id, with None in place of each frozen one."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if is_trained(_name(path)) else None, dict(specs))


def _check_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Check that every pattern matches a parameter."""
    for pattern in patterns:
        if not any(matches_any(name, [pattern]) for name in names):
            layers = dict.fromkeys(name.partition("/")[0] for name in names)
            near = difflib.get_close_matches(pattern, [*layers, *names] if "/" not in pattern else names, n=1, cutoff=0)
            raise InputError(f"tune.{key}: no parameter or layer matches '{pattern}'; the nearest is {near[0]}")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
