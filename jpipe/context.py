"""Contexts for tracing layers: they set the platform and the mesh, and suspend the user's mesh."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

__all__ = [
    "StageMesh",
    "traced_mesh",
    "traced_platform",
    "tracing_for",
    "tracing_on",
    "without_mesh",
]

_platform: ContextVar[str | None] = ContextVar("_platform", default=None)


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def tracing_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """Trace layers for a platform other than JAX's default, such as "gpu" when stages are compiled for another machine's GPU."""
    return _set(_platform, platform)


def traced_platform() -> str:
    """Return the platform that layers are traced for ("cpu", "gpu" or "tpu"), so that a layer can compute differently on each."""
    return _platform.get() or jax.default_backend()


@dataclass(frozen=True)
class StageMesh:
    """The mesh of a stage, for layers that use `jax.shard_map` to compute on it.

    Attributes:
        mesh: the names and sizes of the mesh axes, without devices.
        axes: for each logical axis of parameters that is sharded, the mesh axis that shards it.
        rows: the mesh axes over which the rows of a microbatch are sharded.
    """

    mesh: AbstractMesh
    axes: Mapping[str, str]
    rows: tuple[str, ...]


_mesh: ContextVar[StageMesh | None] = ContextVar("_mesh", default=None)


def tracing_on(mesh: StageMesh | None) -> contextlib.AbstractContextManager[None]:
    """Trace layers for a stage on this mesh; None means a stage on one device."""
    return _set(_mesh, mesh)


def traced_mesh() -> StageMesh | None:
    """Return the mesh that layers are traced for; None for one device.

    `LayerStack.specs` traces layers for one device, so their shapes and dtypes must be the same with and without a mesh.
    """
    return _mesh.get()


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Suspend the mesh that the user has set with `jax.set_mesh`, because the plan decides which devices a stage has.

    Inside a function that JAX traces, this context changes nothing.
    """
    outside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    with contextlib.suppress(ValueError):  # JAX is tracing
        outside = jax.set_mesh(None)
    with outside:
        yield
