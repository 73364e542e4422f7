"""Load a model and continue prompts, token by token."""

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
from jpipe_train.generate import model_source
from jpipe_train.generate.decoder import Decoder, bytes_of
from jpipe_train.generate.placement import place
from jpipe_train.generate.sampling import Sampling, choose
from jpipe_train.generate.texts import Texts, start_texts
from jpipe_train.generate.token_text import Conversion
from jpipe_train.models.transformer import dtype_of

MOST_TOKENS = 10**7
_LARGEST = 1e6
_SEEDS = 2**32


@dataclass(frozen=True)
class Request:
    """A request to generate text.

    Attributes:
        source: the folder of a run, or one in Hugging Face's layout.
        prompts: the texts to continue.
        tokens: the largest number of tokens for each prompt.
        temperature: as in `Sampling`; None for 1 with `top_k` or `top_p`, otherwise 0.
        top_k: as in `Sampling`.
        top_p: as in `Sampling`.
        seed: the seed of sampling.
        step: as in `model_source.find`.
        weights: as in `model_source.find`.
        tokenizer: as `tokens_of` in `model_source.find`.
        dtype: as in `model_source.find`.
        devices: the number of devices; None for as few as have the memory.
        as_json: whether to write a JSON object for each prompt at the end, in place of text as it is generated.
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
    """Generate text.

    Args:
        request: what to generate.
        write: writes text, piece by piece.
        say: prints a line about it.

    Returns:
        Whether the texts are complete; False if Ctrl-C was pressed.

    Raises:
        InputError: an option, the folder or a prompt is invalid; the model does not fit the devices; its logits are NaN.
    """
    sampling = _sampling(request)
    source = model_source.find(request.source, request.step, request.weights, request.tokenizer, request.dtype, say)
    words, most = source.words(), source.config.max_positions_used
    prompts = [_tokens_of(text, number, words, source) for number, text in enumerate(request.prompts, 1)]
    texts = Texts(start_texts(request.prompts, prompts, request.tokens, most, words), words, request.as_json, write, say)
    positions = max(text.length + text.most for text in texts.each)
    if line := compile_cache.use(source.compile_cache):
        say(line)
    force_cpu_devices(request.devices or 1)
    start_devices()
    source = _on_cpus(source, request.dtype) if jax.default_backend() == "cpu" else source
    devices = place(bytes_of(source.config, len(prompts), positions), jax.local_devices(), request.devices)
    used = list(dict.fromkeys(devices.values()))
    say(f"{source.description}; {source.config.compute_dtype}, {count(len(used), 'device')} ({used[0].platform})")
    decoder = Decoder(source.config, model_source.parameters(source, devices, interrupt.check), devices)
    interrupt.check()
    known = np.isin(np.arange(min(int(words.symbols[-1]) + 1, source.config.vocab_size)), words.symbols)
    with interrupt.delayed():  # Ctrl-C is checked after each token, so that no output is cut off
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
    """Yield the tokens that follow the prompts, one for each prompt per step, while the next step already runs.

    Args:
        decoder: the model.
        prompts: the tokens of each prompt.
        positions: as in `Decoder.begin`.
        most: the number of steps.
        sampling: how a token is chosen.
        seed: the seed of sampling.
        known: shape (n,), which of the first n tokens may be chosen; later ones may not.
    """
    rows = np.arange(len(prompts), dtype=np.int32)
    pick = jax.jit(lambda logits, *key: choose(jnp.where(known, logits[:, : len(known)], -jnp.inf), sampling, *key))
    tokens = pick(decoder.begin(prompts, positions), np.uint32(seed), rows, np.int32(0))
    for step in range(1, most):
        following = pick(decoder.follow(tokens), np.uint32(seed), rows, np.int32(step))
        yield np.asarray(tokens)
        tokens = following
    yield np.asarray(tokens)


def _on_cpus(source: model_source.Origin, dtype: str | None) -> model_source.Origin:
    """Return the model for CPUs, which do not compute in float16.

    Raises:
        InputError: the user has requested float16.
    """
    if dtype == "float16":
        raise InputError("--dtype: expected float32 or bfloat16 on CPUs, which do not compute in float16, found that; leave it out")
    half = dtype_of(source.config) == "float16"
    return replace(source, config=source.config.model_copy(update={"compute_dtype": "float32"})) if half else source


def _sampling(request: Request) -> Sampling:
    """Return the sampling that the options describe.

    Raises:
        InputError: an option is out of range, or would have no effect.
    """
    draws = request.top_k is not None or request.top_p is not None
    temperature = request.temperature if request.temperature is not None else 1.0 if draws else 0.0
    if not request.prompts:
        raise InputError("--prompt: expected a text to continue, found none; give --prompt TEXT, or pipe one in")
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


def _tokens_of(text: str, number: int, words: Conversion, source: model_source.Origin) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        InputError: there are none, too many, or one unknown to the model; the text is not UTF-8, and the tokenizer has no bytes.
    """
    where, longest = f"prompt {number}", source.config.max_positions_used
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
    if (largest := max(tokens)) >= source.config.vocab_size:
        raise InputError(
            f"{where}: expected tokens below {source.config.vocab_size} (model.vocab_size), found {largest}, "
            f"{short(words.decode([largest]))}; is it the tokenizer of this model?"
        )
    return tokens


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # `surrogateescape` has made surrogates of bytes
        byte, at = ord(text[error.start]) & 0xFF, len(text[: error.start].encode())
        raise InputError(f"{where}: expected text in UTF-8, found the byte 0x{byte:02x} at {at}; convert it to UTF-8") from None
