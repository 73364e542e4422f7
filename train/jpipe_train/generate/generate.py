"""From a request to texts: a model is read and goes on from prompts, token by token."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jpipe import InputError
from jpipe.errors import short
from jpipe_train.assemble import compile_cache
from jpipe_train.assemble.build import force_cpu_devices, start_devices
from jpipe_train.checkpoint.export import Weights
from jpipe_train.console import interrupt
from jpipe_train.console.terminal import count
from jpipe_train.generate import origin
from jpipe_train.generate.decoder import Decoder, bytes_of
from jpipe_train.generate.placement import place
from jpipe_train.generate.sampling import Sampling, choose
from jpipe_train.generate.texts import Texts, begun
from jpipe_train.generate.words import Words
from jpipe_train.models.transformer import dtype_of

MOST_TOKENS = 10**7
_LARGEST = 1e6
_SEEDS = 2**32


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        source: the folder of a run, or one in Hugging Face's layout.
        prompts: what is gone on from.
        tokens: at most so many for each prompt.
        temperature: as in `Sampling`; None: 1 with `top_k` or `top_p`, otherwise 0.
        top_k: as in `Sampling`.
        top_p: as in `Sampling`.
        seed: of what is drawn.
        step: as in `origin.find`, and so are the next three.
        weights: which.
        tokenizer: a file.
        dtype: a name.
        devices: on so many; None: on as few as have the memory.
        as_json: a JSON object for each prompt, in the end, in place of text as it comes.
    """

    source: str
    prompts: Sequence[str]
    tokens: int = 100
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    step: int | None = None
    weights: Weights = "newest"
    tokenizer: str | None = None
    dtype: str | None = None
    devices: int | None = None
    as_json: bool = False


def main(request: Request, write: Callable[[str], None], say: Callable[[str], None]) -> bool:
    """Generate.

    Args:
        request: what.
        write: gets the text, piece by piece.
        say: gets lines about it.

    Returns:
        Whether it came to its end; False: Ctrl-C was pressed.

    Raises:
        InputError: an option, the folder or a prompt is not what it should be; it does not fit the devices; or the model gives what are no
            numbers.
    """
    sampling = _sampling(request)
    found = origin.find(request.source, request.step, request.weights, request.tokenizer, request.dtype, say)
    words, most = found.words(), found.config.max_positions_used
    prompts = [_tokens_of(text, number, words, found) for number, text in enumerate(request.prompts, 1)]
    texts = Texts(begun(request.prompts, prompts, request.tokens, most, words), words, request.as_json, write, say)
    positions = max(text.length + text.most for text in texts.each)
    if line := compile_cache.use(found.compile_cache):
        say(line)
    force_cpu_devices(request.devices or 1)
    start_devices()
    found = _on_cpus(found, request.dtype) if jax.default_backend() == "cpu" else found
    devices = place(bytes_of(found.config, len(prompts), positions), jax.local_devices(), request.devices)
    used = list(dict.fromkeys(devices.values()))
    say(f"{found.told}; {found.config.compute_dtype}, {count(len(used), 'device')} ({used[0].platform})")
    decoder = Decoder(found.config, origin.parameters(found, devices, interrupt.check), devices)
    interrupt.check()
    known = np.isin(np.arange(min(int(words.symbols[-1]) + 1, found.config.vocab_size)), words.symbols)
    with interrupt.held():  # nothing is cut off in the middle: it is looked for Ctrl-C after each token
        texts.head()
        for tokens in sequences(decoder, prompts, positions, max(text.most for text in texts.each), sampling, request.seed, known):
            texts.add(tokens)
            if interrupt.pressed() or texts.are_done:
                break
        texts.finish()
    return not interrupt.pressed()


def sequences(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    positions: int,
    most: int,
    sampling: Sampling,
    seed: int,
    known: Bool[np.ndarray, " n"],
) -> Iterator[Int[np.ndarray, " b"]]:
    """The tokens that follow the prompts: at each step one for each prompt. The next step is on its way while these are looked at.

    Args:
        decoder: the model.
        prompts: the tokens of each.
        positions: as in `Decoder.begin`.
        most: how many steps.
        sampling: how each is chosen.
        seed: of what is drawn.
        known: whether each of the first tokens of the model may be chosen; the others may not.
    """
    rows = np.arange(len(prompts), dtype=np.int32)
    pick = jax.jit(lambda logits, *drawn: choose(jnp.where(known, logits[:, : len(known)], -jnp.inf), sampling, *drawn))
    tokens = pick(decoder.begin(prompts, positions), np.uint32(seed), rows, np.int32(0))
    for step in range(1, most):
        following = pick(decoder.follow(tokens), np.uint32(seed), rows, np.int32(step))
        yield np.asarray(tokens)
        tokens = following
    yield np.asarray(tokens)


def _on_cpus(found: origin.Origin, dtype: str | None) -> origin.Origin:
    """Where CPUs are the devices, which do not compute in float16.

    Raises:
        InputError: the user has asked for it.
    """
    if dtype == "float16":
        raise InputError("--dtype: expected float32 or bfloat16 on CPUs, which do not compute in float16, found that; leave it out")
    half = dtype_of(found.config) == "float16"
    return replace(found, config=found.config.model_copy(update={"compute_dtype": "float32"})) if half else found


def _sampling(request: Request) -> Sampling:
    """From the options.

    Raises:
        InputError: one of them is out of range, or would mean nothing.
    """
    draws = request.top_k is not None or request.top_p is not None
    temperature = request.temperature if request.temperature is not None else 1.0 if draws else 0.0
    if not request.prompts:
        raise InputError("--prompt: expected a text to go on from, found none; give --prompt TEXT, or pipe one in")
    if not 1 <= request.tokens <= MOST_TOKENS:
        raise InputError(f"--tokens: expected from 1 to {MOST_TOKENS:,}, found {short(request.tokens)}; how many are to come?")
    if not (math.isfinite(temperature) and 0 <= temperature <= _LARGEST):
        raise InputError(f"--temperature: expected from 0 (the likeliest token) to {_LARGEST:,.0f}, found {temperature}; 1 is as trained")
    if request.top_k is not None and request.top_k < 1:
        raise InputError(f"--top-k: expected 1 or more tokens, found {short(request.top_k)}; leave it out for all")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise InputError(f"--top-p: expected a probability above 0, at most 1, found {request.top_p}; 0.9 is usual")
    if temperature == 0 and draws:
        option = "--top-k" if request.top_k is not None else "--top-p"
        raise InputError(
            f"{option}: would mean nothing with --temperature 0, which always takes the likeliest token; leave one of them out"
        )
    if not 0 <= request.seed < _SEEDS:
        raise InputError(f"--seed: expected from 0 to {_SEEDS - 1}, found {short(request.seed)}; choose another")
    return Sampling(temperature, request.top_k, None if request.top_p == 1 else request.top_p)


def _tokens_of(text: str, number: int, words: Words, found: origin.Origin) -> list[int]:
    """The tokens of a prompt.

    Raises:
        InputError: there are none, or too many, or one that the model has not; the text is not UTF-8, and the tokenizer is none of bytes.
    """
    where, longest = f"prompt {number}", found.config.max_positions_used
    if not words.takes_bytes:
        _check_text(text, where)
    tokens = words.prompt(text)
    if not tokens:
        raise InputError(
            f"{where}: expected a text, found an empty one, and the model has no token that begins a text; give the first words"
        )
    if len(tokens) >= longest:
        raise InputError(
            f"{where}: expected at most {longest - 1} tokens, for the model has {longest} positions (model.max_positions), found "
            f"{len(tokens)}; make it shorter"
        )
    if (largest := max(tokens)) >= found.config.vocab_size:
        raise InputError(
            f"{where}: expected tokens below {found.config.vocab_size} (model.vocab_size), found {largest}, "
            f"{short(words.decode([largest]))}; is it the tokenizer of this model?"
        )
    return tokens


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # `surrogateescape` has made surrogates of bytes
        byte, at = ord(text[error.start]) & 0xFF, len(text[: error.start].encode())
        raise InputError(f"{where}: expected text in UTF-8, found the byte 0x{byte:02x} at {at}; convert it to UTF-8") from None
