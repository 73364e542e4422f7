"""Contexts of traces: for which platform and which mesh, and without the settings of JAX for the user's own programs."""

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
    """Trace layers for another platform than JAX's default one, such as "gpu" where stages are compiled for a GPU that is not here."""
    return _set(_platform, platform)


def traced_platform() -> str:
    """Return the platform that layers are traced for, for layers that compute differently on some: "cpu", "gpu" or "tpu"."""
    return _platform.get() or jax.default_backend()


@dataclass(frozen=True)
class StageMesh:
    """The mesh of a stage, for layers that say themselves how they compute on it, with `jax.shard_map`.

    Attributes:
        mesh: its axes and their sizes, without devices.
        axes: the axis over which each logical axis of parameters is sharded, of those that are.
        rows: the axes over which the rows of a microbatch are sharded.
    """

    mesh: AbstractMesh
    axes: Mapping[str, str]
    rows: tuple[str, ...]


_mesh: ContextVar[StageMesh | None] = ContextVar("_mesh", default=None)


def tracing_on(mesh: StageMesh | None) -> contextlib.AbstractContextManager[None]:
    """Trace layers for a stage on a mesh, or with None for one device."""
    return _set(_mesh, mesh)


def traced_mesh() -> StageMesh | None:
    """Return the mesh that layers are traced for; None for one device.

    `LayerStack.specs` traces them for one device, so shapes and dtypes must be the same with and without a mesh.
    """
    return _mesh.get()


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
