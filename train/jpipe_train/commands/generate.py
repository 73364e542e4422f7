"""`jpipe generate RUN`: continue texts with a trained model."""

from typing import Annotated, Literal

import tyro

from jpipe_train.commands.parsing import Count, OptionalCount, Weights
from jpipe_train.console import interrupt


def generate(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FOLDER")],
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = (),
    tokens: Count = 100,
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T")] = None,
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None,
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None,
    seed: Count = 0,
    step: OptionalCount = None,
    weights: Weights = "newest",
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE|bytes")] = None,
    devices: OptionalCount = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    as_json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="json")] = False,
) -> int:
    """Go on from a text with a model that was trained, and write what comes to standard output.

    Args:
        source: The folder of a run, such as runs/0001, or one in Hugging Face's layout, with config.json.
        prompt: The text to go on from; several times: of each. Without it standard input is read.
        tokens: At most so many come; fewer where the text ends, or the positions of the model do.
        temperature: 0: always the likeliest token; otherwise one is drawn, 1: as the model says. By default 1 with the next two, else 0.
        top_k: Draw one of the K likeliest tokens.
        top_p: Draw one of the likeliest tokens that have the probability P together, such as 0.9.
        seed: Of what is drawn.
        step: Of the checkpoint after so many steps; by default of the newest that is whole.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
        tokenizer: A tokenizer.json in place of the model's own; bytes: each byte is a token.
        devices: Lay the layers on so many devices, one after the other; by default on as few as have the memory.
        dtype: In which the model computes; by default as in training, or as a folder's weights are.
        as_json: Write an object of JSON for each prompt in the end, with prompt, text, tokens and end.
    """
    with interrupt.importing():
        from jpipe_train.generate import command
        from jpipe_train.generate import generate as generating

    return command.run(
        generating.Request(source, prompt, tokens, temperature, top_k, top_p, seed, step, weights, tokenizer, dtype, devices, as_json)
    )
