"""The built-in language models as layers of a pipeline."""

from collections.abc import Callable
from functools import partial

from flax import nnx

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.tune_config import TuneConfig
from jpipe_lm.models import bert, heads, transformer
from jpipe_lm.models.lora import tuned


def layers(config: ModelConfig, chunk: int | None = None, tune: TuneConfig | None = None) -> jpipe.LayerStack:
    """Return the layers `embed`, `block_0` … `block_{depth-1}`, `head` as constructors; nothing is allocated here.

    Inputs are tokens (b, s), or {"tokens": tokens, "segments": segments} where several documents share a row: segments count from 1, 0 is
    padding, positions begin anew with each, and none attends to another. BERT also takes {"types": 0 or 1 for each token}. Outputs are
    logits (b, s, v), of BERT {"tokens": logits, "next": logits (b, 2)}; for heads other than `language` see
    `jpipe_lm.models.heads.Head`. For `multiple_choice` inputs are (b, k, s), for the k choices of an example.

    Args:
        config: which model, one without a target.
        chunk: leave the logits to the loss, which makes them for this many positions at a time: in their place outputs have an
            `jpipe_train.losses.cross_entropy.Unprojected`.
        tune: the section `tune`, for adapters; None: without.
    """
    kind = bert if config.kind == "bert" else transformer
    configs = config.blocks
    constructors = {id(block): partial(transformer.Block, block) for block in configs}  # jpipe traces each object once
    blocks = {f"block_{i}": constructors[id(block)] for i, block in enumerate(configs)}
    tie = jpipe.Tie(("embed", "token/embedding"), ("head", "token/embedding"))
    is_language = config.head == "language"
    head = partial(kind.Head, config, chunk) if is_language else partial(heads.Head, config)
    all_layers: dict[str, Callable[..., nnx.Module]] = {"embed": partial(kind.Embed, config), **blocks, "head": head}
    ties = [tie] if config.tied and is_language else ()
    return jpipe.LayerStack(tuned(all_layers, config, tune or TuneConfig()), ties, mixes_rows=config.experts is not None)
