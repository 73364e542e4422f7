"""Where a model comes from that is to generate: the folder of a run, or one in Hugging Face's layout. Read a layer at a time."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jpipe
from jpipe import InputError
from jpipe.checkpoints import files as checkpoint_files
from jpipe.files import resolved
from jpipe_train.assemble import compile_cache
from jpipe_train.checkpoint import huggingface, warm_start
from jpipe_train.checkpoint.export import Weights, by_name, step_of, with_ema
from jpipe_train.config import config_file
from jpipe_train.config import huggingface as config_json
from jpipe_train.config.config import AUTO, Config
from jpipe_train.config.model_config import ModelConfig
from jpipe_train.data import tokenizer
from jpipe_train.data.files import token_files
from jpipe_train.generate import words
from jpipe_train.generate.decoder import Tree, layers_of
from jpipe_train.generate.words import Words

_SETTINGS = ("config.json", "generation_config.json")  # of Hugging Face's layout; both may say which tokens end a text
_PARTIAL = re.compile("; (is it of another model\\? W|w)ith warm_start.mode=partial what fits .*is taken")


@dataclass(frozen=True)
class Origin:
    """A model that can be read.

    Attributes:
        told: what it is, for the user.
        config: of the model; it computes in its `compute_dtype`.
        read: of a layer, by its id, the arrays by their path, such as "qkv/kernel".
        words: what its tokens mean; it fails where that is not known.
        compile_cache: as in a config.
    """

    told: str
    config: ModelConfig
    read: Callable[[str], dict[str, np.ndarray]]
    words: Callable[[], Words]
    compile_cache: str | None

    def layer(self, layer_id: str, specs: Tree) -> Tree:
        """The parameters of a layer, as the module with these specs has them.

        Kernels and embeddings are in the dtype in which they are used, the others as they are.

        Raises:
            InputError: there are others, or of other shapes.
        """
        found = self.read(layer_id)

        def of(path: Any, spec: Any) -> np.ndarray:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name not in found or found[name].shape != spec.shape:
                there = f"found it of shape {list(found[name].shape)}" if name in found else "found no such name"
                raise InputError(
                    f"{self.told}: expected '{layer_id}/{name}' of shape {list(spec.shape)}, as its config says, {there}; the weights are "
                    "of another model"
                )
            return found[name].astype(jnp.dtype(self.config.compute_dtype), copy=False) if spec.ndim > 1 else found[name]

        return jax.tree_util.tree_map_with_path(of, specs)


def find(
    source: str, step: int | None, weights: Weights, tokens_of: str | None, dtype: str | None, report: Callable[[str], None]
) -> Origin:
    """The model in a folder. No array is read.

    Args:
        source: the folder of a run, or one in Hugging Face's layout.
        step: of the checkpoint of a run; None: the newest that is whole.
        weights: of a run: the newest, or their moving average.
        tokens_of: a tokenizer.json in place of the model's own, or "bytes".
        dtype: in which the model computes; None: as in training, or as its weights are in the folder.
        report: gets a line for each newer checkpoint that is damaged.

    Raises:
        InputError: no such folder or checkpoint; a model that cannot generate; what the tokens mean is not known.
    """
    folder = resolved(source, "generate")
    if folder.is_file():
        huggingface.refuse_file(folder)
        raise InputError(f"generate: expected the folder of a run or of Hugging Face's layout, found the file '{source}'; give a folder")
    if not folder.exists():
        raise InputError(f"generate: there is no folder '{source}'; give that of a run, such as runs/0001, or one in Hugging Face's layout")
    if not huggingface.is_meant(folder):
        return _of_run(folder, source, step, weights, tokens_of, dtype, report)
    for option, is_given in (("--step", step is not None), ("--weights", weights != "newest")):
        if is_given:
            raise InputError(f"{option}: expected the folder of a run, found one of Hugging Face's layout, '{source}'; leave it out")
    return _of_folder(folder, source, tokens_of, dtype)


def _of_run(
    folder: Path, source: str, step: int | None, weights: Weights, tokens_of: str | None, dtype: str | None, report: Callable[[str], None]
) -> Origin:
    chosen = step_of(folder, step, "generate", report)
    config = config_file.load_resolved(folder / "config.yaml")
    if config.model.target is not None:
        raise InputError(
            f"generate: expected a model of jpipe's own, found '{config.model.target}' (model.target), of which it is not known how to go "
            "on from one token to the next; write a loop of your own around its layers (jpipe.checkpoints reads the weights)"
        )
    _check_decodes(config.model, source)
    if step is not None:  # or else it is verified already
        checkpoint_files.verify(folder, chosen)
    there = checkpoint_files.layer_specs(folder, chosen)
    entries = {name: place for name in there if (place := jpipe.runtime.shared_place(name, there))}

    def read(layer_id: str) -> dict[str, np.ndarray]:
        wanted = [layer_id, *(name for name, place in entries.items() if place[0] == layer_id)]
        read = checkpoint_files.read_layers(folder, chosen, wanted, verified=True)
        return _without(layer_id, by_name(read if weights == "newest" else with_ema(read, chosen)))

    def own_words() -> Words:
        if tokens_of is not None:
            return _given_words(tokens_of)
        file = tokenizer.file_of(config)
        if config.data.target is None and file is None:
            return words.of_bytes()
        if file is None:
            raise InputError(
                f"generate: expected to know what the tokens of '{source}' mean, found that it was trained on data of your own "
                "(data.target); give --tokenizer FILE, or --tokenizer bytes"
            )
        return words.of_tokenizer(_loaded(file, f"generate: the tokenizer of '{source}'", config.data.end_of_text), ends=_ends(config))

    computes = dtype or config.precision.computes or config.model.compute_dtype
    averaged = "" if weights == "newest" else ", moving average of the weights"
    return Origin(f"{source}, step {chosen}{averaged}", _computing(config.model, computes), read, own_words, config.compile_cache)


def _of_folder(folder: Path, source: str, tokens_of: str | None, dtype: str | None) -> Origin:
    keys = config_json.read(folder).keys
    config = ModelConfig.model_validate({**keys, "seq_len": 1})
    _check_decodes(config, source)
    try:
        there = huggingface.source(folder)
        warm_start.fitting(there, {"": {name: spec._replace(dtype="float32") for name, spec in there.specs.items()}}, strict=True)
    except InputError as error:  # it is made for warm_start
        lines = (line.replace("warm_start.file: ", "generate: ") for line in error.args)
        raise InputError(*(_PARTIAL.sub("; download it again", line) for line in lines)) from None
    of_layer: dict[str, list[str]] = {}
    for name in there.specs:
        of_layer.setdefault(name.partition("/")[0], []).append(name)

    def read(layer_id: str) -> dict[str, np.ndarray]:
        (found,) = there.read({layer_id: of_layer[layer_id]})
        return _without(layer_id, found)

    def own_words() -> Words:
        begins, ends = _special(folder, config.vocab_size)
        if tokens_of is not None:
            return _given_words(tokens_of, begins, ends)
        if not (folder / tokenizer.FILE).exists():
            raise InputError(f"generate: expected a {tokenizer.FILE} in '{source}', found none; give --tokenizer FILE")
        return words.of_tokenizer(_loaded(folder / tokenizer.FILE, "generate"), begins, ends)

    kept = there.specs["embed/token/embedding"].dtype
    computes = dtype or (kept if kept in ("bfloat16", "float16") else "float32")
    return Origin(source, _computing(config, computes), read, own_words, compile_cache.AUTO)


def _check_decodes(model: ModelConfig, source: str) -> None:
    if model.kind != "decoder":
        raise InputError(
            f"generate: expected a decoder (model.kind), found {model.kind} in '{source}': it reads a text from both sides and fills gaps "
            "in it, but says nothing of what comes next; give a GPT or a Llama"
        )


def _computing(model: ModelConfig, dtype: str) -> ModelConfig:
    return model.model_copy(update={"compute_dtype": dtype})


def _without(layer_id: str, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{layer_id}/"): np.asarray(array) for name, array in arrays.items()}


def _given_words(given: str, begins: tuple[int, ...] = (), ends: tuple[int, ...] = ()) -> Words:
    return words.of_bytes() if given == words.BYTES else words.of_tokenizer(_loaded(Path(given), "--tokenizer"), begins, ends)


def _loaded(file: Path, where: str, end: str | None = AUTO) -> tokenizer.Tokenizer:
    try:
        return tokenizer.load(file, where, end)
    except InputError as error:
        hint = "" if where == "--tokenizer" else "; or give --tokenizer FILE"
        raise InputError(*(f"{line}{hint}" for line in error.args)) from None


def _ends(config: Config) -> tuple[int, ...]:
    """The token that ends each document of a folder of tokens; nothing if the folder is not there any more."""
    if config.data.target is None and config.data.format == "tokens" and config.data.path is not None:
        with contextlib.suppress(InputError):
            end = token_files.read_index(config.data.path, "data.path")[1].end_of_text
            return () if end is None else (end,)
    return ()


def _special(folder: Path, vocab_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that begin and that end a text, as far as the folder says."""
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    for name in _SETTINGS:
        if not (folder / name).is_file():
            continue
        said = config_json.load_json(folder / name, config_json.MOST_BYTES)
        begins = begins or _tokens(said.get("bos_token_id"), vocab_size)[:1]
        ends += _tokens(said.get("eos_token_id"), vocab_size)
    return begins, ends


def _tokens(found: Any, vocab_size: int) -> tuple[int, ...]:
    numbers = found[:100] if isinstance(found, list) else [found]
    return tuple(number for number in numbers if type(number) is int and 0 <= number < vocab_size)


def parameters(origin: Origin, devices: dict[str, jax.Device], check: Callable[[], None]) -> dict[str, Tree]:
    """The parameters of all layers, each on its device; never more than one layer is in memory twice.

    Args:
        origin: of the model.
        devices: of each layer.
        check: called before each layer.

    Raises:
        InputError: they do not fit the model, or a file is damaged.
    """
    found: dict[str, Tree] = {}
    for layer_id, layer in layers_of(origin.config).items():
        check()
        specs = layer.specs
        ties = layer_id == "head" and origin.config.tied
        if ties:
            specs.pop("token")
        found[layer_id] = jax.device_put(origin.layer(layer_id, specs), devices[layer_id])
        if ties:
            found[layer_id]["token"] = jax.device_put(found["embed"]["token"], devices[layer_id])
    return found
