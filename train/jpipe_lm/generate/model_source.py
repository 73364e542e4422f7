"""Load a model for generation from a run folder or a Hugging Face folder, one layer at a time."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe import InputError
from jpipe.files import resolved
from jpipe_lm.checkpoint import huggingface
from jpipe_lm.checkpoint.adapters import merged
from jpipe_lm.config.data_config import DataConfig
from jpipe_lm.config.huggingface import adapter_config, read_config
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.sections import data_of, tune_of
from jpipe_lm.config.tune_config import LoraConfig, TuneConfig
from jpipe_lm.data import tokenizer
from jpipe_lm.data.files import token_files
from jpipe_lm.generate import token_text
from jpipe_lm.generate.decoder import Tree, layers_of
from jpipe_lm.generate.request import Request
from jpipe_lm.generate.token_text import Conversion
from jpipe_train.assemble import compile_cache
from jpipe_train.checkpoint import warm_start
from jpipe_train.checkpoint.weights import SavedWeights, check_steps, choose
from jpipe_train.config import config_file
from jpipe_train.config.config import AUTO, Config
from jpipe_train.registry import located

_SETTINGS = ("config.json", "generation_config.json")  # files in Hugging Face's layout that may name the tokens at the end of a text


@dataclass(frozen=True)
class Origin:
    """The source of a model."""

    description: str  # a description of the model for the user
    config: ModelConfig  # the config of the model. The model computes in its `compute_dtype`.
    # a function from a layer id to a dict from paths, such as "qkv/kernel", to the arrays of the layer
    read: Callable[[str], dict[str, np.ndarray]]
    words: Callable[[], Conversion]  # returns the conversion between text and tokens, or raises InputError if it is unknown
    compile_cache: str | None  # the same as the config key

    def layer(self, layer_id: str, specs: Tree) -> Tree:
        """Read the parameters of a layer; only kernels and embeddings are converted to the dtype of the computation.

        Raise InputError if parameters are missing, or have other shapes.
        """
        arrays = self.read(layer_id)

        def convert(path: Any, spec: Any) -> np.ndarray:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name not in arrays or arrays[name].shape != spec.shape:
                actual = f"found the shape {list(arrays[name].shape)}" if name in arrays else "found no such parameter"
                raise InputError(
                    f"{self.description}: expected '{layer_id}/{name}' of shape {list(spec.shape)}, according to its config, {actual}; the "
                    "weights belong to another model"
                )
            return arrays[name].astype(jnp.dtype(self.config.compute_dtype), copy=False) if spec.ndim > 1 else arrays[name]

        return jax.tree_util.tree_map_with_path(convert, specs)


def find(request: Request, report: Callable[[str], None]) -> Origin:
    """Find the model of a request, in a folder of a run or in Hugging Face's layout, without reading arrays.

    `report` prints a line for each newer checkpoint that is damaged. Raise InputError if the folder or checkpoint does not exist, the model
    cannot generate, or its tokenizer is unknown.
    """
    source = request.source
    folder = resolved(str(located(source, "generate")), "generate")
    if folder.is_file():
        huggingface.reject_file(folder)
        raise InputError(f"generate: expected a run folder or a folder in Hugging Face's layout, found the file '{source}'; give a folder")
    if not folder.exists():
        raise InputError(
            f"generate: there is no folder '{source}'; give a run folder, such as runs/0001, or a folder in Hugging Face's layout"
        )
    huggingface.reject_adapters(folder, "generate", "--adapters")
    if not huggingface.is_meant(folder):
        if request.adapters is not None:
            raise InputError(f"--adapters: expected a model in Hugging Face's layout, found the run '{source}'; remove --adapters")
        return _find_in_run(folder, request, report)
    for option, is_set in (("--step", request.step is not None), ("--weights", request.weights != "newest")):
        if is_set:
            raise InputError(f"{option}: expected a run folder, found a folder in Hugging Face's layout, '{source}'; remove {option}")
    return _find_in_folder(folder, request)


def _find_in_run(folder: Path, request: Request, report: Callable[[str], None]) -> Origin:
    source, step, tokens_of = request.source, request.step, request.tokenizer
    check_steps(folder, step, "generate")
    config = config_file.load_resolved(folder / "config.yaml")
    if not isinstance(model := config.model, ModelConfig):
        found = f"'{model.kind}' (model.kind)" if model.target is None else f"'{model.target}' (model.target)"
        raise InputError(
            f"generate: expected a built-in model, found {found}, and jpipe does not know how it generates the next token; "
            "write a loop of your own around its layers (jpipe.checkpoints reads the weights)"
        )
    _check_decodes(model, source)
    saved = SavedWeights(choose(folder, step, "generate", report), request.weights)  # reads checkpoints, which can take a long time
    known = layers_of(model)
    if further := [layer_id for layer_id in saved.layers.values() if layer_id not in known]:
        raise InputError(f"generate: cannot apply the layer '{further[0]}' of the run '{source}'; give a run without bottlenecks")

    def read(layer_id: str) -> dict[str, np.ndarray]:
        return _strip_layer_id(layer_id, merged(saved.read([layer_id]), model, tune_of(config)))

    def find_words() -> Conversion:
        if tokens_of is not None:
            return _chosen_words(tokens_of)
        file = tokenizer.file_of(config)
        if isinstance(config.data, DataConfig) and file is None:
            return token_text.of_bytes()
        if file is None:
            raise InputError(
                f"generate: expected a model with a known tokenizer, found '{source}', which was trained on data of your own "
                "(data.target); give --tokenizer FILE, or --tokenizer bytes"
            )
        loaded = _load_tokenizer(file, f"generate: the tokenizer of '{source}'", data_of(config).end_of_text)
        return token_text.of_tokenizer(loaded, ends=_end_tokens(config), chat_template=data_of(config).chat_template)

    computes = request.dtype or config.computes
    averaged = "" if request.weights == "newest" else ", moving average of the weights"
    return Origin(
        f"{source}, step {saved.checkpoint.step}{averaged}", _with_compute_dtype(model, computes), read, find_words, config.compile_cache
    )


def _find_in_folder(folder: Path, request: Request) -> Origin:
    source, tokens_of, adapters = request.source, request.tokenizer, request.adapters
    base, tune = read_config.read(folder), TuneConfig()
    keys = base.keys
    config = ModelConfig.model_validate(read_config.whole_section(keys))
    _check_decodes(config, source)
    again = "download it again"
    arrays = huggingface.source(folder, named_by="generate", hint=again)
    model = {"": {name: spec._replace(dtype="float32") for name, spec in arrays.specs.items()}}
    warm_start.fitting(arrays, model, strict=True, hint=again)
    if adapters is not None:
        beside = resolved(str(located(adapters, "--adapters")), "--adapters")
        tune = TuneConfig(lora=LoraConfig(**adapter_config.read_adapters(beside, base).lora))
        arrays = huggingface.with_adapters(arrays, beside, base, "language")
    names_of_layer: dict[str, list[str]] = {}
    for name in arrays.specs:
        names_of_layer.setdefault(name.partition("/")[0], []).append(name)

    def read(layer_id: str) -> dict[str, np.ndarray]:
        (layer,) = arrays.read({layer_id: names_of_layer[layer_id]})
        return _strip_layer_id(layer_id, merged(layer, config, tune))

    def find_words() -> Conversion:
        begins, ends = _special_tokens(folder, config.vocab_size)
        if tokens_of is not None:
            return _chosen_words(tokens_of, begins, ends)
        if not (folder / tokenizer.FILE).exists():
            raise InputError(f"generate: expected a {tokenizer.FILE} in '{source}', found none; give --tokenizer FILE")
        return token_text.of_tokenizer(_load_tokenizer(folder / tokenizer.FILE, "generate"), begins, ends)

    stored = arrays.specs["embed/token/embedding"].dtype
    computes = request.dtype or (stored if stored in ("bfloat16", "float16") else "float32")
    described = source if adapters is None else f"{source} with the adapters in {adapters}"
    return Origin(described, _with_compute_dtype(config, computes), read, find_words, compile_cache.AUTO)


def _check_decodes(model: ModelConfig, source: str) -> None:
    if model.head != "language":
        raise InputError(
            f"generate: expected a language model, found model.head {model.head} in '{source}', which judges whole texts; give a model "
            "with model.head language"
        )
    if model.kind != "decoder":
        raise InputError(
            f"generate: expected a decoder (model.kind), found {model.kind} in '{source}', which reads a text in both directions and fills "
            "gaps, but does not predict the next token; give a decoder"
        )


def _with_compute_dtype(model: ModelConfig, dtype: str) -> ModelConfig:
    return model.model_copy(update={"compute_dtype": dtype})


def _strip_layer_id(layer_id: str, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{layer_id}/"): np.asarray(array) for name, array in arrays.items()}


def _chosen_words(tokens_of: str, begins: tuple[int, ...] = (), ends: tuple[int, ...] = ()) -> Conversion:
    return (
        token_text.of_bytes()
        if tokens_of == token_text.BYTES
        else token_text.of_tokenizer(_load_tokenizer(Path(tokens_of), "--tokenizer"), begins, ends)
    )


def _load_tokenizer(file: Path, where: str, end: str | None = AUTO) -> tokenizer.Tokenizer:
    try:
        return tokenizer.load(file, where, end)
    except InputError as error:
        raise (error if where == "--tokenizer" else error.with_change("give --tokenizer FILE")) from error.__cause__


def _end_tokens(config: Config) -> tuple[int, ...]:
    """Return the token that ends each document in the run's folder of tokens; empty if there is none, or the folder does not exist."""
    if isinstance(config.data, DataConfig) and config.data.format == "tokens" and config.data.first_path is not None:
        with contextlib.suppress(InputError):
            end = token_files.read_index(config.data.first_path, "data.path")[1].end_of_text
            return () if end is None else (end,)
    return ()


def _special_tokens(folder: Path, vocab_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that begin a text and the tokens that end it, if the folder specifies them."""
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    for name in _SETTINGS:
        if not (folder / name).is_file():
            continue
        settings = read_config.load_json(folder / name, read_config.MOST_BYTES)
        begins = begins or _valid_tokens(settings.get("bos_token_id"), vocab_size)[:1]
        ends += _valid_tokens(settings.get("eos_token_id"), vocab_size)
    return begins, ends


def _valid_tokens(value: Any, vocab_size: int) -> tuple[int, ...]:
    numbers = value[:100] if isinstance(value, list) else [value]
    return tuple(number for number in numbers if type(number) is int and 0 <= number < vocab_size)


def parameters(origin: Origin, devices: dict[str, jax.Device], check: Callable[[], None]) -> dict[str, Tree]:
    """Load the parameters of this process's layers onto their devices. At most one layer is in memory twice.

    `check` is called before each layer. Raise InputError if parameters do not match the model, or a file is damaged.
    """
    params: dict[str, Tree] = {}
    for layer_id, layer in layers_of(origin.config).items():
        if devices[layer_id].process_index != jax.process_index():
            continue
        check()
        specs = layer.specs
        ties = layer_id == "head" and origin.config.tied
        if ties:
            specs.pop("token")
        params[layer_id] = jax.device_put(origin.layer(layer_id, specs), devices[layer_id])
        if ties:
            embed = params["embed"] if "embed" in params else origin.layer("embed", layers_of(origin.config)["embed"].specs)
            params[layer_id]["token"] = jax.device_put(embed["token"], devices[layer_id])
    return params
