"""Layers of a pair that share a parameter; the model of the reference has it once."""

from dataclasses import dataclass

from tests.pairs.option import Option


@dataclass(frozen=True)
class SharedParameters(Option):
    stays = True
    layers: tuple[str, str]

    @classmethod
    def draw(cls, random, shape):
        first, second = sorted(random.sample([layer for stage in shape.stages for layer in stage], 2))
        return cls((first, second))

    def model(self):
        return {"tie": self.layers}


PAIRS = {"shared parameters": SharedParameters}
