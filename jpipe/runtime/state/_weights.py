"""The weights of a worker by version: the latest alone, two of them, or a stash of as many as microbatches in flight read."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

Tree = Any


class Weights(ABC):
    """The weight versions that a worker holds, an immutable pytree. A version is the number of updates that made it."""

    @property
    @abstractmethod
    def versions(self) -> tuple[int, ...]:
        """The numbers of the versions, the oldest first."""

    @abstractmethod
    def read(self, version: int) -> Tree:
        """Return the parameters of a version, by layer id."""

    @abstractmethod
    def with_update(self, params: Tree, retires: int | None = None) -> "Weights":
        """Return the weights with the version after the newest one, and without the version that it retires, if any."""

    @abstractmethod
    def with_params(self, version: int, params: Tree) -> "Weights":
        """Return the weights with other parameters at a version."""

    @abstractmethod
    def without(self, version: int) -> "Weights":
        """Return the weights without a version that no microbatch will read."""

    @property
    def newest(self) -> int:
        """The newest version, which the next update starts from."""
        return self.versions[-1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latest(Weights):
    """One version, which each update replaces: for stages whose microbatches all read the newest weights.

    Attributes:
        params: the parameters, by layer id.
        version: the number of the version.
    """

    params: Tree
    version: int = field(default=0, metadata={"static": True})

    @property
    def versions(self) -> tuple[int, ...]:
        return (self.version,)

    def read(self, version: int) -> Tree:
        assert version == self.version
        return self.params

    def with_update(self, params: Tree, retires: int | None = None) -> "Latest":
        assert retires == self.version
        return Latest(params, self.version + 1)

    def with_params(self, version: int, params: Tree) -> "Latest":
        assert version == self.version
        return Latest(params, version)

    def without(self, version: int) -> "Latest":
        raise AssertionError("the latest version is not released")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DoubleBuffer(Weights):
    """The current version and the one before it (the shadow), into whose memory the next update writes, as in PipeDream-2BW.

    Attributes:
        current: the parameters of the newest version, by layer id.
        shadow: those of the version before; None when no microbatch in flight reads them.
        version: the number of the newest version.
    """

    current: Tree
    shadow: Tree = None
    version: int = field(default=0, metadata={"static": True})

    @property
    def versions(self) -> tuple[int, ...]:
        return (self.version,) if self.shadow is None else (self.version - 1, self.version)

    def read(self, version: int) -> Tree:
        if version == self.version:
            return self.current
        assert version == self.version - 1
        assert self.shadow is not None
        return self.shadow

    def with_update(self, params: Tree, retires: int | None = None) -> "DoubleBuffer":
        if self.shadow is None and retires == self.version:
            return DoubleBuffer(params, None, self.version + 1)
        assert retires == (None if self.shadow is None else self.version - 1)
        return DoubleBuffer(params, self.current, self.version + 1)

    def with_params(self, version: int, params: Tree) -> "DoubleBuffer":
        assert version in self.versions
        return DoubleBuffer(*((params, self.shadow) if version == self.version else (self.current, params)), self.version)

    def without(self, version: int) -> "DoubleBuffer":
        assert version == self.version - 1
        return DoubleBuffer(self.current, None, self.version)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stash(Weights):
    """All versions that microbatches in flight read, and the newest one, as in PipeDream's weight stashing.

    Attributes:
        params: the parameters of each version, by version and layer id.
    """

    params: Mapping[int, Tree]

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self.params))

    def read(self, version: int) -> Tree:
        return self.params[version]

    def with_update(self, params: Tree, retires: int | None = None) -> "Stash":
        remaining = {version: old for version, old in self.params.items() if version != retires}
        return Stash({**remaining, self.newest + 1: params})

    def with_params(self, version: int, params: Tree) -> "Stash":
        assert version in self.params
        return Stash({**self.params, version: params})

    def without(self, version: int) -> "Stash":
        return Stash({number: params for number, params in self.params.items() if number != version})


def weights_of(versions: Mapping[int, Tree], most: int) -> Weights:
    """Return the weights of a worker in the structure for its stage.

    Args:
        versions: parameters by version, consecutive.
        most: how many versions a worker of the stage holds at most.
    """
    newest = max(versions)
    if most == 1:
        return Latest(versions[newest], newest)
    if most == 2:
        return DoubleBuffer(versions[newest], versions.get(newest - 1), newest)
    return Stash(versions)
