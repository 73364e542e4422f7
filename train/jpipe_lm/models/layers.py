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
    """Return constructors of the layers `embed`, `block_0` … `block_{depth-1}` and `head`. No parameters are allocated.

    Inputs are tokens (b, s). If several documents share a row, inputs are {"tokens": tokens, "segments": segments}: segments count from 1,
    0 is padding, the positions of each segment begin at 0, and segments do not attend to each other. For BERT, inputs may also have
    "types": 0 or 1 for each token. For `multiple_choice`, arrays have the shape (b, k, s), for the k choices of an example.

    Outputs are logits (b, s, v), for BERT {"tokens": logits, "next": logits (b, 2)}. With a `chunk`, the loss computes the logits, for that
    many positions at a time, and the outputs have an `jpipe_train.losses.cross_entropy.Unprojected` instead. For heads other than
    `language` see `jpipe_lm.models.heads.Head`. `tune` may add adapters.
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
    mixes_rows = config.experts is not None or config.attention == "cudnn"  # the number of documents of all rows chooses cuDNN's layout
    return jpipe.LayerStack(tuned(all_layers, config, tune or TuneConfig()), ties, mixes_rows=mixes_rows)
