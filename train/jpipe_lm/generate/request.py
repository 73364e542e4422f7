"""The arguments of `jpipe generate` as a dataclass; tyro makes the command-line options from it."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jpipe_train.console.options import Count, Flag, OptionalCount, OptionalStep, Weights


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe generate`.

    Attributes:
        source: A run folder, a folder in Hugging Face's layout, or the name of a model, such as hf:owner/name.
        prompts: The text to continue; without it, standard input is read.
        tokens: Generate at most N tokens, fewer if the text ends or the model has no more positions. Default: 100, with --chat 1,000.
        stops: End the output before this text.
        is_chat: Hold a conversation. Each line of standard input is a message of the user. Ctrl-C stops an answer, Ctrl-D ends the
            conversation.
        system: The system message at the beginning of a conversation.
        temperature: 0 always chooses the most likely token; 1 samples with the model's probabilities. Default: 1 with --top-k or --top-p,
            otherwise 0.
        top_k: Sample from the K most likely tokens.
        top_p: Sample from the most likely tokens that together have the probability P, such as 0.9.
        seed: The seed of sampling.
        step: The checkpoint after N steps, or the best; by default the newest complete one.
        weights: The newest parameters, or their moving average (ema).
        adapters: A folder in PEFT's layout, or its name, with adapters for a model in Hugging Face's layout.
        tokenizer: A tokenizer.json that replaces the model's own. bytes: each byte is a token.
        devices: Place the layers on N devices; by default on the fewest with enough memory, with several processes on all.
        dtype: The dtype of the computation; by default the dtype of training, or the dtype of the weights in a folder.
        as_json: At the end, write one JSON object for each prompt, with prompt, text, tokens and end.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FOLDER|NAME")]
    prompts: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="prompt", metavar="TEXT")] = ()
    tokens: OptionalCount = None
    stops: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="stop", metavar="TEXT")] = ()
    is_chat: Annotated[Flag, tyro.conf.arg(name="chat")] = False
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T")] = None
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    seed: Count = 0
    step: OptionalStep = None
    weights: Weights = "newest"
    adapters: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE|bytes")] = None
    devices: OptionalCount = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False
