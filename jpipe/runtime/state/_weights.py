"""The weights of a worker by version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightVersions:
    """The weight versions that a worker holds, an immutable pytree. The number of a version is the number of updates that made it.

    A worker holds the newest version, from which the next update starts, and the versions that microbatches in flight read. A schedule that
    flushes has no older versions, PipeDream-2BW has one, and PipeDream's weight stashing may have as many as microbatches in flight.

    Attributes:
        params: the parameters of each version, by version and layer id.
    """

    params: Mapping[int, Tree]

    @property
    def versions(self) -> tuple[int, ...]:
        """The numbers of the versions, the oldest first."""
        return tuple(sorted(self.params))

    @property
    def newest(self) -> int:
        """The newest version."""
        return max(self.params)

    def read(self, version: int) -> Tree:
        """Return the parameters of a version, by layer id."""
        return self.params[version]

    def with_update(self, params: Tree, retires: int | None = None) -> "WeightVersions":
        """Return the weights with a new version after the newest one; the version `retires` is removed, if it is not None."""
        remaining = {version: old for version, old in self.params.items() if version != retires}
        return WeightVersions({**remaining, self.newest + 1: params})

    def with_params(self, version: int, params: Tree) -> "WeightVersions":
        """Return the weights, with the parameters of one version replaced."""
        assert version in self.params
        return WeightVersions({**self.params, version: params})

    def without(self, version: int) -> "WeightVersions":
        """Return the weights without a version that no microbatch will read."""
        return WeightVersions({number: params for number, params in self.params.items() if number != version})
