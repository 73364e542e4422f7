"""Sums in parts in a pair: no number changes."""

from dataclasses import dataclass

from tests.pairs.option import Option, composition


@dataclass(frozen=True)
class SumsInParts(Option):
    replicas = 2
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def draw(cls, random, shape):
        return cls(tuple(composition(random, len(layers)) if r > 1 else () for layers, r in zip(shape.stages, shape.replicas, strict=True)))

    def stage(self, s):
        return {"sum_parts": self.parts[s]}


PAIRS = {"sums in parts": SumsInParts}
