"""What the global norm changes in the rule of the reference of pairs: clipping, and batches that are skipped."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jpipe import DynamicLossScale, Precision
from tests.pairs.option import Option, clipped, norm_of
from tests.pairs.reference import Array, Place, Run


def report_norm(run: Run, p: int, gradients: Mapping[Place, Array]) -> float:
    """Return the global norm, and report that of the first pipeline, as it is before anything is clipped."""
    norm = norm_of(gradients)
    if p == 0:
        run.metrics["norms"].setdefault(run.batch, norm)
    return norm


@dataclass(frozen=True)
class SkippedBatches(Option):
    """A batch with a gradient that is not finite changes nothing."""

    stays = True
    bad: int

    @classmethod
    def draw(cls, random, shape):
        return cls(random.randint(0, 4))

    def pipeline(self):
        return {"skip_nonfinite": True}

    def data(self):
        return {"bad": (self.bad,)}

    def gradients(self, run, p, due, gradients):
        run.skipped[p] = not math.isfinite(report_norm(run, p, gradients))
        return gradients


@dataclass(frozen=True)
class DynamicScale(Option):
    """A dynamic loss scale: it changes no finite gradient, skips batches, and follows from the batches that were skipped."""

    stays = True
    initial: float
    growth_every: int
    bad: tuple[int, ...]

    @classmethod
    def draw(cls, random, shape):
        return cls(2.0 ** random.randint(0, 5), random.randint(1, 3), tuple(sorted(random.sample(range(5), 2))))

    def pipeline(self):
        return {"precision": Precision(loss_scale=DynamicLossScale(self.initial, self.growth_every))}

    def data(self):
        return {"bad": self.bad}

    def begin(self, run):
        run.kept["loss scale"] = self.initial, 0

    def gradients(self, run, p, due, gradients):
        run.skipped[p] = not math.isfinite(report_norm(run, p, gradients))
        scale, finite = run.kept["loss scale"]
        finite = 0 if run.skipped[p] else finite + 1
        if run.skipped[p]:
            scale = max(scale / 2, 1.0)
        elif finite == self.growth_every:
            scale, finite = 2 * scale, 0
        run.kept["loss scale"] = scale, finite
        run.metrics["loss_scales"][run.batch] = scale
        return gradients

    def resume(self, old, new):
        new.kept["loss scale"] = old.kept["loss scale"]


@dataclass(frozen=True)
class ClippedGlobalNorm(Option):
    stays = True
    largest: float

    @classmethod
    def draw(cls, random, shape):
        return cls(random.choice((0.2, 0.5, 1.0)))

    def pipeline(self):
        return {"clip_global_norm": self.largest}

    def gradients(self, run, p, due, gradients):
        return clipped(gradients, report_norm(run, p, gradients), self.largest)


PAIRS = {
    "skipped batches": SkippedBatches,
    "dynamic loss scale": DynamicScale,
    "clipped global norm": ClippedGlobalNorm,
}
