"""Contexts that keep settings of JAX for the user's own programs away from the programs of a pipeline."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from jpipe.errors import InputError

__all__ = [
    "traced_platform",
    "tracing_for",
    "without_mesh",
]

_platform: ContextVar[str | None] = ContextVar("_platform", default=None)


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Trace layers for another platform than JAX's default one, such as "gpu" where stages are compiled for a GPU that is not here."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def traced_platform() -> str:
    """Return the platform that layers are traced for, for layers that compute differently on some: "cpu", "gpu" or "tpu"."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Run without the mesh that the user has set (`jax.set_mesh`): the plan says which devices a stage has.

    Inside a function that JAX compiles nothing is changed.
    """
    outside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    with contextlib.suppress(ValueError):  # it is being traced
        outside = jax.set_mesh(None)
    with outside:
        yield


@contextlib.contextmanager
def isolated_context() -> Iterator[None]:
    """Run a method of a pipeline, without the mesh and the transfer guard that the user has set.

    Other settings of JAX hold for it, too, such as `jax.default_matmul_precision` while `init` compiles.

    Raises:
        InputError: `jax.disable_jit` is on, or the call is inside a function that JAX traces.
    """
    if getattr(jax.config, "jax_disable_jit", False):  # not in the types of all versions
        raise InputError(
            "jax_disable_jit is on: a pipeline runs programs that are compiled ahead; turn it off, and to look into a layer use "
            "jax.debug.print, or call LayerStack.apply without a pipeline"
        )
    try:
        outside = jax.set_mesh(None)
    except ValueError:
        raise InputError(
            "a method of a pipeline was called inside a function that JAX traces (jax.jit, jax.grad, …): a pipeline compiles programs of "
            "its own; call it outside"
        ) from None
    with outside, jax.transfer_guard("allow"):  # numbers of microbatches, say, go to devices
        yield
