"""What waits in host memory in a pair: no number changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.pairs.option import Option


@dataclass(frozen=True)
class HostMemory(Option):
    parts: Mapping[str, Any]

    @classmethod
    def draw(cls, random, shape):
        names = random.sample(("optimizer", "versions", "residuals", "stash"), random.randint(1, 3))
        some = [s for s in range(len(shape.stages)) if random.random() < 0.6]
        return cls({name: random.choice(["all", some or [0]]) for name in sorted(names)})

    def plan(self):
        return {"offload": dict(self.parts)}


PAIRS = {"host memory": HostMemory}
