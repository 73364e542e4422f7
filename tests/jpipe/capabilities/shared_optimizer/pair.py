"""A pair whose replicas share an optimizer: no number changes."""

from tests.pairs.option import Option


class SharedOptimizer(Option):
    replicas = 2

    def plan(self):
        return {"shard_optimizer": True}


PAIRS = {"shared optimizer": SharedOptimizer}
