"""The functions, masks and options inside an optax transformation, for messages.

Transformations are closures, so these parts are read from closed-over variables. Values in other places are not found.
"""

import difflib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jpipe.model._function_arguments import closed_over

Tree = Any

_RATE = "adamw with a learning-rate schedule, or optax.contrib.schedule_free_adamw, which needs none"
_INSTEAD = (
    ({"clip_by_global_norm", "skip_large_updates"}, "clip_global_norm of the pipeline clips by the norm over all stages"),
    ({"apply_if_finite", "skip_not_finite"}, "skip_nonfinite of the pipeline skips a batch in all stages"),
    ({"normalize", "normalize_by_update_norm"}, "clip_global_norm of the pipeline, or lamb or lars, which take norms of single parameters"),
    ({"prodigy", "dadapt_adamw", "mechanize", "scale_by_dog", "scale_by_dowg", "scale_by_distance_over_gradients"}, _RATE),
    ({"add_noise"}, "optax.partition with an add_noise for each layer, each with its own key"),
    ({"flatten"}, "leave out optax.flatten: inside it all parameters are one array"),
    ({"scale_by_zoom_linesearch", "scale_by_backtracking_linesearch", "scale_by_polyak", "momo", "momo_adam", "reduce_on_plateau"}, _RATE),
    ({"scale_by_sophia", "sophia", "hutchinson_estimator_diag_hessian"}, _RATE),
    ({"differentially_private_aggregate"}, "a pipeline has no gradients of single examples; leave it out"),
    ({"lookahead"}, "ema_decay of the pipeline keeps an average of the weights"),
    ({"monitor"}, "leave out optax.monitor; with clip_global_norm of the pipeline a step returns the norm of the gradient"),
)


def instead_of(transformation: Any) -> str:
    """Name replacements for the functions of optax in a transformation that a pipeline cannot use; return "" if there are none."""
    return "; ".join(dict.fromkeys(words for names, words in _INSTEAD if names & constructors_of(transformation)))


def instead_of_slices(transformation: Any) -> str:
    """Name replacements for an optimizer that computes with all slices of a stacked array together."""
    lists = "keep the blocks in a list, each with its own arrays, or use a rule for single numbers, such as adamw"
    if "scale_by_muon" in constructors_of(transformation):
        return f"give muon_weight_dimension_numbers for the matrices of the blocks, and None for their biases; or {lists}"
    return f"{instead}; or {lists}" if (instead := instead_of(transformation)) else lists


def constructors_of(transformation: Any) -> set[str]:
    """Return the names of the functions and classes that made the parts of a transformation."""
    return {function.__qualname__.partition(".")[0] for function in _functions(transformation)}


def has_nesterov(transformation: Any) -> bool:
    """Return whether functions and closed-over variables of a transformation show that it uses Nesterov's momentum."""
    functions = list(_functions(transformation))
    if any(function.__qualname__.startswith(("scale_by_compensated_", "scale_by_torch_nadam.")) for function in functions):
        return True
    named = [pair for function in functions for pair in _variables(function)]
    for _, value in list(named):  # arguments of optax.inject_hyperparams
        named += (getattr(value, "keywords", {}) if not isinstance(value, Mapping) else value).items()
    explicit = [value for name, value in named if name == "nesterov"]
    defaults = [(getattr(function, "__kwdefaults__", None) or {}).get("nesterov") for function in functions]
    return any(value is True for value in explicit or defaults)


def unfit_mask(transformation: Any, specs: Mapping[str, Tree]) -> str:
    """Describe how a mask, or labels, given as dicts differ from the model's structure, by layer id; return "" if none does."""
    named = [pair for function in _functions(transformation) for pair in _variables(function)]
    # arguments of optax.inject_hyperparams
    named += [(str(name), value) for _, values in named if isinstance(values, Mapping) for name, value in values.items()]
    masks = [value for name, value in named if isinstance(value, Mapping) and ("mask" in name or "label" in name)]
    return next((words for mask in masks if (words := _mismatch(mask, specs, (), specs))), "")


def _mismatch(mask: Any, tree: Any, path: tuple[str, ...], specs: Mapping[str, Tree]) -> str:
    if not isinstance(mask, Mapping):
        return ""  # one value for all leaves below it
    if not isinstance(tree, Mapping):
        return f"'{'/'.join(path)}' is one array in the model; give one value for it"
    for key in mask:
        if key not in tree:
            name, leaves = "/".join((*path, str(key))), jax.tree_util.tree_leaves_with_path(specs)
            known = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves} if path else specs
            return f"the model has no '{name}'; the nearest is '{difflib.get_close_matches(name, known, n=1, cutoff=0)[0]}'"
    for key, inner in tree.items():
        if key not in mask:
            return f"it lacks '{'/'.join((*path, str(key)))}'; name all layers and parameters, or give a function"
        if words := _mismatch(mask[key], inner, (*path, str(key)), specs):
            return words
    return ""


def _functions(transformation: Any) -> Iterator[Any]:
    """Yield each function of a transformation once."""
    seen: dict[int, Any] = {}
    waiting = [transformation]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept alive, so that no other value gets its id
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, tuple | list):
            waiting += value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif hasattr(value, "__qualname__"):
            waiting += [value for _, value in _variables(value)]
            yield value


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the closed-over variables of a function, with their names; for a method also the attributes of its object."""
    yield from closed_over(function)
    if inspect.ismethod(function):
        yield from getattr(function.__self__, "__dict__", {}).items()
    if hasattr(function, "__wrapped__"):
        yield "", function.__wrapped__
