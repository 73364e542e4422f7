"""The base of the capabilities that are drawn in pairs, and what several of them use."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jpipe.schedules import SCHEDULES
from tests.pairs import reference
from tests.pairs.reference import Array, Place

LIMITED = ("pipedream_flush", "pipedream", "pipedream_2bw")  # in flight, docs/reference/schedules.md has the options of each schedule
IN_CHUNKS = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "pipedream", "pipedream_2bw")
IN_A_V = ("zb_v", "dualpipe_v")
EQUAL_REPLICAS = ("interleaved_1f1b", "interleaved_zero_bubble", *IN_A_V, "auto_zero_bubble")


class Shape(NamedTuple):
    """What a capability sees of a plan when its options are drawn.

    Attributes:
        schedule: by name.
        stages: the layers of each stage.
        replicas: of each stage.
    """

    schedule: str
    stages: tuple[tuple[str, ...], ...]
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Option(reference.Capability):
    """A capability with the values of its options.

    Attributes:
        schedules: that have it; all by default.
        replicas: the least number of them that a stage needs, and whether all stages need as many.
        stays: whether a run that is resumed under another plan keeps the options, because the numbers depend on them.
    """

    schedules: ClassVar[Sequence[str]] = tuple(SCHEDULES)
    replicas: ClassVar[int] = 1
    needs_equal_replicas: ClassVar[bool] = False
    stays: ClassVar[bool] = False

    @classmethod
    def draw(cls, random: Random, shape: Shape) -> "Option":
        """Draw the values of the options."""
        return cls()

    def plan(self) -> dict[str, Any]:
        """Return fields of the plan."""
        return {}

    def stage(self, s: int) -> dict[str, Any]:
        """Return fields of a stage."""
        return {}

    def pipeline(self) -> dict[str, Any]:
        """Return arguments of the pipeline."""
        return {}

    def optimizer(self) -> dict[str, Any]:
        """Return fields of `Rule`."""
        return {}

    def model(self) -> dict[str, Any]:
        """Return fields of `draw.Layers`."""
        return {}

    def data(self) -> dict[str, Any]:
        """Return fields of `draw.Data`."""
        return {}


def composition(random: Random, total: int, parts: int | None = None) -> tuple[int, ...]:
    """Return positive numbers with this sum, as many as `parts` or at random."""
    cuts = sorted(random.sample(range(1, total), (random.randint(1, total) if parts is None else parts) - 1))
    return tuple(end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True))


def norm_of(gradients: Mapping[Place, Array]) -> float:
    """Return the global norm; a parameter that stages share counts once."""
    return math.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))


def clipped(gradients: dict[Place, Array], norm: float, largest: float) -> dict[Place, Array]:
    """Scale gradients down to a norm, as `optax.clip_by_global_norm` does."""
    return gradients if norm < largest else {place: gradient / norm * largest for place, gradient in gradients.items()}
