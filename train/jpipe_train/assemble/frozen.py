"""Freeze the parameters that the section `tune` does not train."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jpipe import InputError
from jpipe_train.config.tune_section import TuneSection, matches_any

Tree = Any


def trains_part(rule: optax.GradientTransformation, config: TuneSection, params: Mapping[str, Tree]) -> optax.GradientTransformation:
    """Return an optimizer that changes only the trained parameters, or `rule` itself if all are trained.

    `params` are specs by layer id. Raise InputError if a pattern matches no parameter, or no parameter is trained.
    """
    is_trained = config.trained()
    if is_trained is None:
        return rule
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(dict(params))]
    for key, patterns in (("freeze", config.freeze), ("train_only", config.train_only)):
        _check_patterns(key, patterns, names)
    config.check_names(names)
    if not any(map(is_trained, names)):
        raise InputError("tune.freeze: expected patterns that leave some parameters trained, found all frozen; remove some patterns")

    labels = jax.tree_util.tree_map_with_path(lambda path, _: "trained" if is_trained(_name(path)) else "frozen", dict(params))
    transforms = {"trained": rule, "frozen": optax.set_to_zero()}
    # `labels` has layer ids as keys. It fails on a whole model's own parameter tree; the optimizer is then called with the layers.
    return optax.partition(transforms, lambda tree: {layer_id: labels[layer_id] for layer_id in tree})


def words(config: TuneSection, params: Mapping[str, Tree], *, random: bool = False) -> str | None:
    """Describe how many parameters are trained, and whether they begin `random`; None if all are trained.

    `params` are specs by layer id; shared parameters are only in the first layer.
    """
    if (is_trained := config.trained()) is None:
        return None
    chosen, every = jax.tree.leaves(part_of(params, is_trained)), jax.tree.leaves(dict(params))
    frozen = sum(leaf.size * leaf.dtype.itemsize for leaf in every) - sum(leaf.size * leaf.dtype.itemsize for leaf in chosen)
    begins_random = random and any(config.adds(_name(path)) for path, _ in jax.tree_util.tree_leaves_with_path(dict(params)))
    begin = "; the frozen parameters are random, because warm_start.file is not set" if begins_random else ""
    return f"tune: {sum(leaf.size for leaf in chosen):,} parameters are trained; {frozen:,} bytes of parameters are frozen{begin}"


def part_of(specs: Mapping[str, Tree], is_trained: Callable[[str], bool]) -> dict[str, Tree]:
    """Return the tree of parameters with None in place of each frozen parameter."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if is_trained(_name(path)) else None, dict(specs))


def _check_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Check that every pattern matches a parameter."""
    for pattern in patterns:
        if not any(matches_any(name, [pattern]) for name in names):
            layers = dict.fromkeys(name.partition("/")[0] for name in names)
            near = difflib.get_close_matches(pattern, [*layers, *names] if "/" not in pattern else names, n=1, cutoff=0)
            raise InputError(f"tune.{key}: no parameter or layer matches '{pattern}'; the most similar name is {near[0]}")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
