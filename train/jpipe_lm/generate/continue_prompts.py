"""Load a model and continue prompts, token by token."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jpipe import InputError
from jpipe.errors import short
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.generate import model_source
from jpipe_lm.generate.decoder import Decoder, bytes_of, scratch_of
from jpipe_lm.generate.placement import place
from jpipe_lm.generate.request import Request
from jpipe_lm.generate.sampling import Sampling, choose
from jpipe_lm.generate.several_prompts import Texts, start_texts
from jpipe_lm.generate.shared import share_of
from jpipe_lm.generate.token_text import Conversion
from jpipe_lm.models.transformer import dtype_of
from jpipe_train.assemble import compile_cache
from jpipe_train.assemble.build import force_cpu_devices, start_devices
from jpipe_train.console import interrupt
from jpipe_train.console.options import Process
from jpipe_train.console.terminal import count
from jpipe_train.launch.team import Team, code_facts

MOST_TOKENS = 10**7
MOST_BY_DEFAULT = 100
_LARGEST = 1e6
_SEEDS = 2**32


def main(request: Request, write: Callable[[str], None], say: Callable[[str], None], team: Team) -> bool:
    """Generate text after at least one prompt. Return whether the texts are complete; False if Ctrl-C was pressed.

    Only process 0 calls `write`, which writes pieces of text, and `say`, which prints a line about the text. Raise InputError if an option,
    the folder or a prompt is invalid, the model is too large for the devices, or its logits are NaN, and PeerLost if another process died,
    hung or stopped.
    """
    if not team.is_first:
        write = say = ignore

    def prepare() -> tuple[model_source.Origin, Conversion, list[list[int]], Texts]:
        check_options(request)
        source = model_source.find(request, say)
        words, most = source.words(), source.config.max_positions_used
        prompts = [_tokens_of(text, number, words, source) for number, text in enumerate(request.prompts, 1)]
        tokens = MOST_BY_DEFAULT if request.tokens is None else request.tokens
        begun = start_texts(request.prompts, prompts, tokens, most, words, request.stops)
        return source, words, prompts, Texts(begun, words, request.as_json, write, say)

    source, words, prompts, texts = team.run_on_all(prepare)
    agree_on(request, source, team)
    model = start(request, source, words, len(prompts), max(text.length + text.most for text in texts.each), say, team)
    return model.answer(prompts, texts, request.seed)


def agree_on(request: Request, source: model_source.Origin, team: Team) -> None:
    """Check that all processes have the same request and model."""
    team.agree(lambda: {**code_facts(), "what is generated": repr(request), "the model": f"{source.description} {source.config}"})


def ignore(_: str) -> None:
    """Print nothing. Processes other than process 0 use this function."""


@dataclass(frozen=True)
class Model:
    """A model on devices."""

    decoder: Decoder  # the model
    sampling: Sampling  # how tokens are chosen
    known: Bool[np.ndarray, " n"]  # shape (n,): for each of the first n tokens, whether it may be chosen. Later tokens may not be chosen.
    stops_at_once: bool = False  # whether Ctrl-C ends an answer immediately, as with several processes, or after the current token

    def answer(self, prompts: Sequence[Sequence[int]], texts: Texts, seed: int) -> bool:
        """Generate texts after prompts, given as tokens, until all have ended (True) or Ctrl-C is pressed (False).

        Raise InputError if the logits are NaN.
        """
        positions, most = max(text.length + text.most for text in texts.each), max(text.most for text in texts.each)
        # Ctrl-C is checked after each token, so that no output is cut off. Several processes would not stop after the same token.
        with contextlib.nullcontext() if self.stops_at_once else interrupt.delayed():
            texts.head()
            for tokens in sequences(self.decoder, prompts, positions, most, self.sampling, seed, self.known):
                texts.add(tokens)
                if interrupt.pressed() or texts.are_done:
                    break
            texts.finish()
        return not interrupt.pressed()


def start(
    request: Request,
    source: model_source.Origin,
    words: Conversion,
    rows: int,
    positions: int,
    say: Callable[[str], None],
    team: Team,
) -> Model:
    """Load a model onto devices, in all processes.

    Memory is reserved for `rows` prompts, and `positions` for each text with its prompt. Raise InputError if the model is too large for the
    devices, or its parameters do not match its config, and PeerLost if another process died, hung or stopped.
    """
    if line := compile_cache.use(source.compile_cache):
        say(line)
    processes = 1 if team.processes is None else team.processes.count
    force_cpu_devices(-(-(request.devices or 1) // processes))
    team.start_devices(Process.connect_limit)

    def load() -> tuple[model_source.Origin, dict[str, jax.Device], Any]:
        start_devices()
        chosen = _on_cpus(source, request.dtype) if jax.default_backend() == "cpu" else source
        sizes, existing = bytes_of(chosen.config, rows, positions), jax.devices()
        number = request.devices if processes == 1 or request.devices is not None else min(len(existing), len(sizes))
        devices = place(sizes, existing, number, scratch_of(chosen.config, rows, positions))
        used = list(dict.fromkeys(devices.values()))
        words = f" of {processes} processes" if processes > 1 else ""
        say(f"{chosen.description}; {chosen.config.compute_dtype}, {count(len(used), 'device')} ({used[0].platform}){words}")
        return chosen, devices, model_source.parameters(chosen, devices, interrupt.check)

    chosen, devices, params = team.run_on_all(load)
    decoder = Decoder(chosen.config, params, devices, share_of(team))
    interrupt.check()
    known = np.isin(np.arange(min(int(words.symbols[-1]) + 1, chosen.config.vocab_size)), words.symbols)
    return Model(decoder, _sampling(request), known, stops_at_once=processes > 1)


def sequences(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    positions: int,
    most: int,
    sampling: Sampling,
    seed: int,
    known: Bool[np.ndarray, " n"],
) -> Iterator[Int[np.ndarray, " b"]]:
    """Yield the tokens that follow the prompts, in `most` steps one token per prompt. Meanwhile the next step is already running.

    `known` has for each of the first tokens whether it may be chosen; later tokens may not. `positions` is as in `Decoder.begin`.
    """
    rows = np.arange(len(prompts), dtype=np.int32)
    pick = _picker(sampling, known.tobytes())

    def chosen(logits: jax.Array | None, step: int) -> Any:
        return decoder.everywhere(None if logits is None else pick(logits, np.uint32(seed), rows, np.int32(step)))

    tokens = chosen(decoder.begin(prompts, positions), 0)
    for step in range(1, most):
        following = chosen(decoder.follow(tokens), step)
        yield np.asarray(tokens)
        tokens = following
    yield np.asarray(tokens)


@functools.lru_cache(maxsize=1)
def _picker(sampling: Sampling, known_tokens: bytes) -> Callable[..., jax.Array]:
    """Return the function that chooses tokens from logits. It is compiled once for all answers of a conversation."""
    known = np.frombuffer(known_tokens, bool)
    return jax.jit(lambda logits, *key: choose(jnp.where(known, logits[:, : len(known)], -jnp.inf), sampling, *key))


def _on_cpus(source: model_source.Origin, dtype: str | None) -> model_source.Origin:
    """Return the model for CPUs with float32 in place of float16, in which they do not compute.

    Raise InputError if the user has requested float16.
    """
    if dtype == "float16":
        raise InputError("--dtype: expected float32 or bfloat16, because CPUs do not compute in float16, found float16; remove --dtype")
    half = dtype_of(source.config) == "float16"
    return replace(source, config=source.config.model_copy(update={"compute_dtype": "float32"})) if half else source


def check_options(request: Request) -> None:
    """Check the options that do not depend on the model."""
    if not request.prompts and not request.is_chat:
        raise InputError(where="--prompt", expected="a text to continue", found="none", change="give --prompt TEXT, or pipe a text in")
    if request.prompts and request.is_chat:
        raise InputError("--prompt has no effect with --chat, which reads the user's messages from standard input; remove --prompt")
    if request.system is not None and not request.is_chat:
        raise InputError(
            "--system has no effect without --chat, because only a conversation has a system message; add --chat, or remove it"
        )
    if "" in request.stops:
        raise InputError(where="--stop", expected="a text that ends the output", found="an empty text", change="remove the option")
    if request.tokens is not None and not 1 <= request.tokens <= MOST_TOKENS:
        raise InputError(f"--tokens: expected from 1 to {MOST_TOKENS:,}, found {short(request.tokens)}; choose another number")
    if not 0 <= request.seed < _SEEDS:
        raise InputError(where="--seed", expected=f"from 0 to {_SEEDS - 1}", found=short(request.seed), change="choose another seed")
    _sampling(request)


def _sampling(request: Request) -> Sampling:
    """Return the sampling that the options describe. Raise InputError if an option is out of range, or would have no effect."""
    draws = request.top_k is not None or request.top_p is not None
    temperature = request.temperature if request.temperature is not None else 1.0 if draws else 0.0
    if not (math.isfinite(temperature) and 0 <= temperature <= _LARGEST):
        raise InputError(
            f"--temperature: expected a number from 0 (always the likeliest token) to {_LARGEST:,.0f}, found {temperature}; "
            "--temperature 1 samples with the model's own probabilities"
        )
    if request.top_k is not None and request.top_k < 1:
        raise InputError(
            where="--top-k", expected="1 or more tokens", found=short(request.top_k), change="without the option all tokens are used"
        )
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise InputError(where="--top-p", expected="a probability above 0, at most 1", found=request.top_p, change="0.9 is usual")
    if temperature == 0 and draws:
        option = "--top-k" if request.top_k is not None else "--top-p"
        raise InputError(f"{option} has no effect with --temperature 0, which always chooses the likeliest token; remove one of them")
    return Sampling(temperature, request.top_k, None if request.top_p == 1 else request.top_p)


def _tokens_of(text: str, number: int, words: Conversion, source: model_source.Origin) -> list[int]:
    """Return the tokens of a prompt.

    Raise InputError if there are none, too many, or one that the model does not have; or if the text is not UTF-8, and the tokenizer has no
    tokens for bytes.
    """
    where = f"prompt {number}"
    if not words.takes_bytes:
        check_text(text, where)
    tokens = words.prompt(text)
    if not tokens:
        raise InputError(
            f"{where}: expected a text, found an empty text, and the model has no token that begins a text; give the first words"
        )
    check_tokens(tokens, words, source.config, where, "make it shorter")
    return tokens


def check_tokens(tokens: Sequence[int], words: Conversion, config: ModelConfig, where: str, hint: str) -> None:
    """Check that a model can continue a text of at least one token; `hint` says what to do if there are too many."""
    longest = config.max_positions_used
    if len(tokens) >= longest:
        raise InputError(
            f"{where}: expected at most {longest - 1} tokens, because the model has {longest} positions (model.max_positions), found "
            f"{len(tokens)}; {hint}"
        )
    if (largest := max(tokens)) >= config.vocab_size:
        raise InputError(
            f"{where}: expected tokens below {config.vocab_size} (model.vocab_size), found {largest}, "
            f"{short(words.decode([largest]))}; is it the tokenizer of this model?"
        )


def check_text(text: str, where: str) -> None:
    """Check that a text from outside is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # `surrogateescape` has turned bytes into surrogates
        byte, at = ord(text[error.start]) & 0xFF, len(text[: error.start].encode())
        raise InputError(f"{where}: expected text in UTF-8, found the byte 0x{byte:02x} at {at}; convert it to UTF-8") from None
