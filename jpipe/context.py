"""Contexts for tracing layers: they set the platform, the mesh and the positions, and suspend the user's mesh."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

__all__ = [
    "Positions",
    "StageMesh",
    "traced_mesh",
    "traced_platform",
    "traced_positions",
    "tracing_at",
    "tracing_for",
    "tracing_on",
    "without_mesh",
]

_platform: ContextVar[str | None] = ContextVar("_platform", default=None)
_in_caches = jax.make_user_context(None)  # what layers may read, so that JAX does not reuse the trace of a `jax.jit` inside a layer


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    mesh, reads = _mesh.get(), _reads.get()
    of_mesh = None if mesh is None else (mesh.mesh, tuple(sorted(mesh.axes.items())), mesh.rows)
    read = _platform.get(), of_mesh, _positions.get(), None if reads is None else reads.token
    try:
        with _in_caches(read if any(part is not None for part in read) else None):
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


@dataclass(frozen=True)
class Positions:
    """The positions of a slice of rows.

    Attributes:
        start: the first position.
        stop: one past the last position.
        length: the number of positions of the whole rows.
    """

    start: int
    stop: int
    length: int

    @property
    def are_last(self) -> bool:
        """Whether no positions come after these."""
        return self.stop == self.length


_positions: ContextVar[Positions | None] = ContextVar("_positions", default=None)


class _Reads(NamedTuple):
    token: object  # a trace from before these reads were noted is not reused
    noted: list[Positions]


_reads: ContextVar[_Reads | None] = ContextVar("_reads", default=None)


def tracing_at(positions: Positions | None) -> contextlib.AbstractContextManager[None]:
    """Trace layers for these positions of the rows; None means whole rows."""
    return _set(_positions, positions)


def traced_positions() -> Positions | None:
    """Return the positions of the rows that layers are traced for, if a plan cuts rows into slices; None for whole rows.

    A layer reads them if it computes something from the number of a position, or draws random numbers: it must draw the numbers of the
    whole row, and use the numbers of its own positions.
    """
    positions, reads = _positions.get(), _reads.get()
    if positions is not None and reads is not None:
        reads.noted.append(positions)
    return positions


@contextlib.contextmanager
def noting_reads() -> Iterator[list[Positions]]:
    """Yield a list to which each call of `traced_positions` for a slice appends."""
    reads = _Reads(object(), [])
    with _set(_reads, reads):
        yield reads.noted


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
