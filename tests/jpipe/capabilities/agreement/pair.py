"""What rare agreement changes in the rule of the reference of pairs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jpipe import Plan
from tests.pairs.option import Option


@dataclass(frozen=True)
class RareAgreement(Option):
    """Pipelines with weights of their own; docs/how-to/agree-rarely.md has the rule, with the same letters."""

    stays = True
    replicas = 2
    needs_equal_replicas = True
    every: int
    delay: int
    mixing: float
    eta: float
    mu: float
    fragments: Any

    @classmethod
    def draw(cls, random, shape):
        every = random.randint(1, 4)
        delay = random.randint(0, every - 1)
        outer = random.choice(((0.7, 0.9), (1.0, 0.0), (0.5, 0.3)))
        return cls(every, delay, random.choice((0.0, 0.3)) if delay else 0.5, *outer, random.choice((None, None, "stages", 2)))

    def plan(self):
        outer = {"learning_rate": self.eta, "momentum": self.mu}
        agree = {"every": self.every, "delay": self.delay, "mixing": self.mixing, "outer": outer, "fragments": self.fragments}
        return {"agree": agree}

    def pipelines(self, plan):
        return plan.replicas[0]

    def agrees(self, plan: Plan, s: int, u: int) -> bool:
        """Return whether an agreement on the weights of a stage begins after update u."""
        count = plan.depth if self.fragments == "stages" else self.fragments or 1
        return u >= 0 and (u + 1) % self.every == (s * count // plan.depth) * self.every // count

    def begin(self, run):
        agreed = {place: [versions[0]] for place, versions in run.weights[0].items()}
        run.kept["agreed"], run.kept["V"], run.kept["under way"] = agreed, dict.fromkeys(run.places, 0.0), {}

    def after(self, run, s, u):
        agreed, momentum, under_way = run.kept["agreed"], run.kept["V"], run.kept["under way"]
        for place in run.updated_by(s):
            a = agreed[place][-1]
            if self.agrees(run.plan, s, u):
                d = np.mean([a - weights[place][-1] for weights in run.weights], axis=0)
                v = momentum[place] = d + self.mu * momentum[place]
                a, under_way[place] = a - self.eta * (d + self.mu * v), u
            agreed[place].append(a)
            if under_way.get(place) == u - self.delay and self.agrees(run.plan, s, u - self.delay):
                own = self.mixing if self.delay else 0.0
                for weights, ordinary in zip(run.weights, run.ordinary, strict=True):
                    weights[place][-1] = ordinary[place][-1] = own * weights[place][-1] + (1 - own) * a
                del under_way[place]

    def read(self, run, v, weights, params):
        return {place: versions[v] for place, versions in run.kept["agreed"].items()}

    def saved(self, old, new, place):
        return None if new.pipelines == old.pipelines else [old.kept["agreed"][place][-1]]

    def resume(self, old, new):
        new.kept["agreed"] = {place: [versions[-1]] * (new.batch + 1) for place, versions in old.kept["agreed"].items()}
        new.kept["V"] = dict(old.kept["V"])
        if new.pipelines == old.pipelines:
            new.kept["under way"] = dict(old.kept["under way"])


PAIRS = {"rare agreement": RareAgreement}
