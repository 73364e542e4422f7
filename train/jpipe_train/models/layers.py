"""The built-in language models as layers of a pipeline."""

from functools import partial

import jpipe
from jpipe_train.config.model_config import ModelConfig
from jpipe_train.models import bert, heads, transformer


def layers(config: ModelConfig, chunk: int | None = None) -> jpipe.LayerStack:
    """Return the layers `embed`, `block_0` … `block_{depth-1}`, `head` as constructors; nothing is allocated here.

    Inputs are tokens (b, s), or {"tokens": tokens, "segments": segments} where several documents share a row: segments count from 1, 0 is
    padding, positions begin anew with each, and none attends to another. BERT also takes {"types": 0 or 1 for each token}. Outputs are
    logits (b, s, v), of BERT {"tokens": logits, "next": logits (b, 2)}; those of a head other than `language` are in
    `jpipe_train.models.heads.Head`. For `multiple_choice` inputs are (b, k, s), for the k choices of an example.

    Args:
        config: which model, one without a target.
        chunk: leave the logits to the loss, which makes them for this many positions at a time: in their place outputs have an
            `jpipe_train.models.cross_entropy.Unprojected`.
    """
    kind = bert if config.kind == "bert" else transformer
    block = partial(transformer.Block, config)  # one object, so that jpipe traces it once
    blocks = {f"block_{i}": block for i in range(config.depth)}
    tie = jpipe.Tie(("embed", "token/embedding"), ("head", "token/embedding"))
    is_language = config.head == "language"
    head = partial(kind.Head, config, chunk) if is_language else partial(heads.Head, config)
    all_layers = {"embed": partial(kind.Embed, config), **blocks, "head": head}
    return jpipe.LayerStack(all_layers, [tie] if config.tied and is_language else ())
