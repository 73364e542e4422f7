"""A cache of the work that many tests repeat: stages lowered and compiled, optimizers probed, configured models built.

Work is repeated when all its inputs are equal: the layers, loss and optimizer (the same objects), stage, shapes, device and JAX settings.
Objects that a test builds for itself are new, so their work is not shared.
"""

import functools
import gc
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest
from jax._src import cache_key

from jpipe.stages import _builder, _bytes, _compile
from jpipe_lm.models import layers as built_in
from jpipe_train.assemble import build, model
from tests.jpipe import running

SETTINGS = (
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_debug_nans",
    "jax_compilation_cache_dir",
)
enabled = True
CACHES: list[dict[Any, Any]] = []  # what is kept, of each function
MAPPINGS = 35_000
LARGEST_CACHE = 500  # keys of each kind that are kept: a compiled stage takes some megabytes


def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that equal keys call it once. A key is a hashable part followed by parts to compare, or None to call always."""
    known: dict[Any, list[tuple[Any, Any]]] = {}
    CACHES.append(known)

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        if not enabled or (keys := key(*arguments)) is None:
            return function(*arguments)
        hashed, compared = (keys[0], *(getattr(jax.config, name) for name in SETTINGS)), keys[1:]
        for other, result in known.get(hashed, ()):
            if other == compared:
                return result
        result = function(*arguments)
        if len(known) >= LARGEST_CACHE:
            del known[next(iter(known))]
        known.setdefault(hashed, []).append((compared, result))
        return result

    return called


def forget_if_full() -> None:
    """Drop all compiled programs when there are many: each takes memory mappings, of which Linux gives a process 65,530.

    A process that runs out of them crashes.
    """
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MAPPINGS:
        for known in CACHES:
            known.clear()
        running.JITTED.clear()
        jax.clear_caches()
        gc.collect()


class CompiledWhenUsed(jax.stages.Compiled):
    """A program of a stage that is compiled when it is first used: most tests use only some of them."""

    def __init__(self, compiled: Callable[[], list[jax.stages.Compiled]]) -> None:
        self.compiled = compiled

    def __getattr__(self, name: str) -> Any:
        if compiled := self.compiled:
            (program,) = compiled()
            for slot in jax.stages.Compiled.__slots__:
                setattr(self, slot, getattr(program, slot))
            vars(self).update(vars(program), compiled=None)
        return object.__getattribute__(self, name)


def shared(patch: pytest.MonkeyPatch) -> None:
    """Share equal work from here on."""

    def share(module: Any, name: str, key: Callable[..., Any]) -> None:
        patch.setattr(module, name, once(getattr(module, name), key))

    share(
        _compile,
        "_lower_call",
        lambda a, name: ((a.functions.stage.layers, a.place, name, a.share, a.any_layout), a.functions, a.chosen),
    )
    at_once = _compile.compile_in_parallel

    def when_used(lowered: Iterable[jax.stages.Lowered], *options: Any) -> list[jax.stages.Compiled]:
        if not enabled:
            return at_once(lowered, *options)
        return [CompiledWhenUsed(functools.partial(at_once, [call], *options)) for call in lowered]

    if jax.config.values["jax_disable_most_optimizations"]:  # otherwise all programs are compiled, as for users
        patch.setattr(_compile, at_once.__name__, when_used)
    share(_compile, "_lower_initializer", lambda layer, x, device: (device, layer, x))
    share(
        _builder,
        "check_gradients",
        lambda stack, layers, first, loss, labels, trained: ((first, *layers), stack, layers, loss, labels, trained.chosen),
    )
    share(
        _builder,
        "find_layerwise",
        lambda rule, params, masters, ties, predicts, _, tree: ((tuple(params), masters, predicts), rule, params, ties, tree),
    )
    share(_bytes, "measure_bytes", lambda f, recomputes, splits=False, chosen=None: ((f.stage.layers, recomputes, splits), f, chosen))
    share(_builder, "check_loss", lambda loss, where, layer_id, y, labels: ((where, layer_id), loss, y, labels))
    # Equal programs for other devices are compiled once: the cache of JAX distinguishes them on CPUs, not on GPUs.
    options_in_key = cache_key._hash_serialized_compile_options
    patch.setattr(cache_key, options_in_key.__name__, lambda key, options, strip_device_assignment: options_in_key(key, options, True))
    # What users name may be another function in the next test: only what is built in is shared.
    share(
        model,
        "layers",
        lambda config, inputs=None: (
            None
            if config.model.target
            else ((repr(config.model), config.train.batch_size, config.computes, repr(config.loss), repr(config.tune)), built_in.layers)
        ),
    )
    share(build, "optimizer", lambda config, steps, params: None if ":" in config.name else ((repr(config), steps), params))
    share(build, "trains_part", lambda rule, config, params: ((repr(config),), rule, params))
    interned, functions_of = once(lambda f: f, lambda f: (f.stage.layers, f)), _builder.StageBuilder.build

    def functions(self: Any, spec: Any) -> list[Any]:
        result = functions_of(self, spec)
        result[:] = [interned(f) for f in result]  # what they know of themselves is worked out once, too
        return result

    patch.setattr(_builder.StageBuilder, "build", functions)
