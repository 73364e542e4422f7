"""`jpipe export --layout huggingface`: write the weights of a run as a folder that transformers loads."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe import InputError
from jpipe.files import expanded, new_folder, read_bytes, shown, unused, write_atomically
from jpipe_lm.checkpoint.adapters import merged, merged_specs
from jpipe_lm.checkpoint.huggingface.names import Layout, layout
from jpipe_lm.checkpoint.huggingface.tensors_file import write_tensors
from jpipe_lm.config.data_config import DataConfig
from jpipe_lm.config.huggingface import read_config, write_config
from jpipe_lm.config.sections import data_of, model_of, tune_of
from jpipe_lm.data import tokenizer
from jpipe_lm.data.chat import template
from jpipe_lm.data.chat.renderer import Renderer
from jpipe_lm.data.chat.tokens import end_of_turn
from jpipe_lm.data.files import token_files
from jpipe_train.assemble import model
from jpipe_train.checkpoint.export import open_run, start_cpu
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.checkpoint.sources.source import Spec
from jpipe_train.checkpoint.weights import by_path
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.console.terminal import count
from jpipe_train.registry import located

LIMIT = 5 * 10**9  # the most bytes of tensors in a file
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class Model(NamedTuple):
    """A model to write.

    Attributes:
        config: the config of the run.
        described: the content of `config.json`, except the parts that depend on the weights.
        names: the names of the tensors.
        specs: shapes and dtypes of the parameters, by jpipe's names.
        read: a function that returns the parameters of a layer, by name.
        origin: a description of where the parameters come from.
    """

    config: Config
    described: dict[str, Any]
    names: Layout
    specs: Mapping[str, Spec]
    read: Callable[[str], Mapping[str, Any]]
    origin: str


def write_huggingface(request: ExportRequest, report: Callable[[str], None]) -> None:
    """Write a folder in Hugging Face's layout with the parameters of a checkpoint, or of a config's run before training.

    Raise InputError as in `open_run`, or if the checkpoint has no moving average, Hugging Face has no layout for the model, or the folder
    cannot be written.
    """
    source, out = request.source, request.path
    path = unused(out, "--out")
    start_cpu()
    if expanded(source, "export").is_file():
        if request.step is not None or request.weights != "newest":
            raise InputError(
                f"export: expected the folder of a run for --step and --weights, found the file '{source}'; leave out both options"
            )
        model = _of_config(source, request.overrides)
    else:
        model = of_run(request, report)
    specs = _specs(model)
    described = model.described | _special(model.config, model.described["vocab_size"]) | _dtypes(specs)
    with new_folder(path, "--out") as unfinished:
        _write_json(unfinished / read_config.CONFIG, described)
        size = write_tensors(unfinished, specs, _tensors(model), LIMIT)
        copied = _copy_tokenizer(model.config, unfinished, lambda line: report(f"{out}: {line}"))
    report(f"{out}: {count(len(specs), 'tensor')}, {size:,} bytes{copied}, {model.origin}")


def of_run(request: ExportRequest, report: Callable[[str], None], *, merge: bool = True) -> Model:
    """Open the parameters of a checkpoint.

    Args:
        merge: whether adapters are added to the weights; otherwise they remain separate parameters.

    Raises:
        InputError: as in `write_huggingface`.
    """
    saved = open_run(request, report)
    config = config_file.load_resolved(saved.checkpoint.folder / "config.yaml")
    described = write_config.to_json_keys(config.model, _architecture(config))
    names = layout(read_config.parse(described))
    if further := [layer_id for layer_id in saved.layers.values() if layer_id not in names.rows]:
        raise InputError(f"export: Hugging Face's layout has no place for the layer '{further[0]}' of the run; leave out --layout")

    def read(layer_id: str) -> Mapping[str, Any]:
        arrays = saved.read([layer_id])
        return merged(arrays, model_of(config), tune_of(config)) if merge else arrays

    specs = merged_specs(saved.specs, tune_of(config)) if merge else saved.specs
    origin = f"step {saved.checkpoint.step} of {request.source}"
    return Model(config, described, names, specs, read, origin)


def _of_config(file: str, overrides: Sequence[str]) -> Model:
    """Open the parameters that the run of a config would begin with."""
    config = config_file.load(file, overrides)
    described = write_config.to_json_keys(config.model, _architecture(config))
    if config.warm_start.file is not None:
        raise InputError(
            f"export: expected a config of a run with fresh weights, found warm_start.file '{config.warm_start.file}'; leave it out"
        )
    stack = model.layers(config)
    rows = config.model.label_count or 1 if model_of(config).head == "multiple_choice" else 1
    inputs = stack.specs(jax.ShapeDtypeStruct((rows, config.model.seq_len), np.dtype("int32")))
    key = jax.random.key(config.seed)

    def read(layer_id: str) -> Mapping[str, Any]:
        init = jax.jit(lambda key, x: stack.init_layer(layer_id, key, x)[0])
        return named(init(key, jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), inputs[layer_id].x)), layer_id)

    def named(tree: Any, layer_id: str) -> dict[str, Any]:
        return {f"{layer_id}/{path}": leaf for path, leaf in by_path(tree).items()}

    specs = {name: Spec(leaf.shape, str(leaf.dtype)) for i, layer in inputs.items() for name, leaf in named(layer.params, i).items()}
    return Model(config, described, layout(read_config.parse(described)), specs, read, f"fresh weights of {file}")


def _specs(model: Model) -> dict[str, Spec]:
    """Return shapes and dtypes of the tensors by name, in their order."""
    specs = model.specs
    for row in model.names:
        for ours, shape in row.shapes.items():
            if ours not in specs or specs[ours].shape != shape:
                instead = f"found it of shape {list(specs[ours].shape)}" if ours in specs else "found no such name"
                raise InputError(
                    f"export: expected '{ours}' of shape {list(shape)} in {model.origin}, as in its config.yaml, {instead}; "
                    "the checkpoint is of another model"
                )
    rows = [(next(iter(row.shapes)), name, shape) for row in model.names for name, shape in row.theirs.items()]
    return {name: Spec(shape, specs[ours].dtype) for ours, name, shape in rows}


def _tensors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors with their names; one layer is in memory at a time."""
    for layer_id, rows in model.names.rows.items():
        arrays = model.read(layer_id)
        for row in rows:
            yield from row.split(arrays).items()


def _dtypes(specs: Mapping[str, Spec]) -> dict[str, str]:
    (dtype, *_) = dict.fromkeys(spec.dtype for spec in specs.values())
    return {"dtype": dtype, "torch_dtype": dtype}  # transformers since 5, and before


def _special(config: Config, vocab_size: int) -> dict[str, Any]:
    """Return the ids of special tokens; unknown ids are null, because the defaults of transformers may be wrong.

    The ids come from the folder of the warm start, if it still exists; the end-of-text token may come from the run's data.
    """
    original = _original(config)
    tokens = {key: original[key] if _is_token(original.get(key), vocab_size) else None for key in _SPECIAL}
    if tokens["eos_token_id"] is None and config.model.kind == "decoder" and _is_token(end := _end_of_text(config), vocab_size):
        tokens["eos_token_id"] = end
    if tokens["pad_token_id"] is None and config.data.format == "labels" and _is_token(padding := _padding(config), vocab_size):
        tokens["pad_token_id"] = padding  # transformers needs it to find the last token of a row
    return tokens


def _architecture(config: Config) -> str | None:
    """Return the architecture that the folder of the warm start names, if the folder still exists: several can describe the same model."""
    names = _original(config).get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _original(config: Config) -> dict[str, Any]:
    """Return the content of `config.json` in the folder of the warm start, if it still exists."""
    with contextlib.suppress(InputError):
        if config.warm_start.file is not None and read_config.is_folder(config.warm_start.file):
            return read_config.load_json(located(config.warm_start.file, "warm_start.file") / read_config.CONFIG, read_config.MOST_BYTES)
    return {}


def _end_of_text(config: Config) -> int | None:
    """Return the token that ends a text in the run's data, if it is known."""
    if not isinstance(data := config.data, DataConfig):
        return None
    with contextlib.suppress(InputError):
        if data.format == "tokens":
            return token_files.read_index(str(data.first_path), "data.path")[1].end_of_text
        if data.tokenizer is not None:
            loaded = tokenizer.load(data.tokenizer, "data.tokenizer", data.end_of_text)
            return loaded.end if data.format != "chat" else _end_of_turn(loaded, data.chat_template)
    return None


def _end_of_turn(loaded: tokenizer.Tokenizer, chosen: str | None) -> int | None:
    with Renderer(template.find(loaded, chosen)) as renderer:
        return next(iter(end_of_turn(renderer, loaded)[0]), loaded.end)


def _padding(config: Config) -> int | None:
    """Return the token that pads rows, if it is known."""
    with contextlib.suppress(InputError):
        return tokenizer.load(str(data_of(config).tokenizer), "data.tokenizer").padding
    return None


def _is_token(value: Any, vocab_size: int) -> bool:
    numbers = value if isinstance(value, list) and 0 < len(value) < 100 else [value]
    return all(type(number) is int and 0 <= number < vocab_size for number in numbers)


def _copy_tokenizer(config: Config, to: Path, say: Callable[[str], None]) -> str:
    """Copy the tokenizer of the run, and return words about it for the printed line."""
    path = tokenizer.file_of(config)
    if path is None:
        return ""
    try:
        content = read_bytes(path, tokenizer.MOST_BYTES)
    except OSError as error:
        say(f"without the run's tokenizer '{shown(path)}', which cannot be read: {error.strerror}")
        return ""
    write_atomically(to / tokenizer.FILE, content)
    # Otherwise transformers builds the default tokenizer of the architecture.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    data = data_of(config)
    has_template = data.format in ("tokens", "preferences") and (path.parent / template.SETTINGS).is_file()
    if data.format == "chat" or data.chat_template is not None or has_template:
        try:
            found = template.find(tokenizer.load(path, "data.tokenizer"), data.chat_template)
        except InputError as error:
            say(f"without the run's chat template: {error}")
        else:
            settings |= found.settings
    _write_json(to / template.SETTINGS, settings)
    return " and the tokenizer"


def _write_json(path: Path, data: Any) -> None:
    write_atomically(path, json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n")
