"""The request of `jpipe generate`, which the command line is read from."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jpipe_train.console.options import Count, Flag, OptionalCount, OptionalStep, Weights


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe generate`.

    Attributes:
        source: The folder of a run, such as runs/0001, or one in Hugging Face's layout, with config.json.
        prompts: The text to continue; may be given several times. Without it standard input is read.
        tokens: At most N tokens; fewer if the text ends, or the model has no more positions. By default 100, and 1,000 with --chat.
        stops: End the output before this text; may be given several times.
        is_chat: Hold a conversation: each line of standard input is what a user says. Ctrl-C stops an answer, Ctrl-D ends the conversation.
        system: The system message, before a conversation.
        temperature: 0 chooses the most likely token, 1 samples from the model's probabilities. By default 1 with the next two, else 0.
        top_k: Sample from the K most likely tokens.
        top_p: Sample from the most likely tokens that together have the probability P, such as 0.9.
        seed: The seed of sampling.
        step: The checkpoint after N steps, or the best one of a run with checkpoint.best; by default the newest complete one.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
        adapters: A folder in PEFT's layout, with adapters for the model of a folder in Hugging Face's.
        tokenizer: A tokenizer.json in place of the model's own; bytes: each byte is a token.
        devices: Place the layers on N devices, in order; by default on as few as have the memory, in several processes on all.
        dtype: The dtype of computation; by default as in training, or of a folder's weights.
        as_json: Write a JSON object for each prompt at the end, with prompt, text, tokens and end.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FOLDER")]
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
