"""Messages between stages: compressed where they are sent, with the random numbers of the run."""

from typing import Any

import jax

from jpipe.plan import Links, Message
from jpipe.stages.messages._compress import compress

Tree = Any

_PURPOSES: dict[Message, int] = {"activations": 6, "gradients": 7}  # of a key of the run; those of the layers are below (`LayerStack`)


def compress_message(links: Links, tree: Tree, message: Message, stage: int, rng: tuple[Any, Any] | None) -> Tree:
    """Compress what a stage sends about a microbatch.

    Args:
        links: how.
        tree: what it sends.
        message: what that is.
        stage: the number of the stage.
        rng: (microbatch, key of the run), which are read for stochastic rounding; None: round to nearest.
    """
    kind = links.kind(message)
    if kind is None or rng is None or not links.draws:
        return compress(tree, kind)
    microbatch, key = rng
    for number in (_PURPOSES[message], stage, microbatch):
        key = jax.random.fold_in(key, number)
    return compress(tree, kind, key)
