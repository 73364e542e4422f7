"""Read folders in PEFT's layout, and convert their modules with adapters to parameters of jpipe."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import shown
from jpipe_lm.checkpoint.huggingface.folder import ADAPTER_WEIGHTS, Folder, look_into_adapters
from jpipe_lm.checkpoint.huggingface.names import Layout, Row, Shape, layout
from jpipe_lm.config.huggingface import adapter_config, read_config
from jpipe_lm.config.huggingface.adapter_config import Adapters
from jpipe_lm.config.huggingface.read_config import Description
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.tune_config import PARTS, is_of_adapter
from jpipe_lm.models.lora import widths_of
from jpipe_train.checkpoint.sources.source import FLOATS, Names, Source, Spec

BEFORE = "base_model.model."  # how names begin, because PEFT wraps the model
_OTHER_RANK = "jpipe's adapters have one rank and alpha; use other adapters, or merge these with PEFT"


class LinearPart(NamedTuple):
    """A part of a linear layer that may have an adapter."""

    adapter: str  # what the names of its parameters begin with, such as "block_0/qkv/lora/q_proj"
    outputs: int  # the number of outputs of the part
    exists: bool  # whether the part has an adapter


class Module(NamedTuple):
    """A module of transformers that has adapters."""

    name: str  # the name of the module, such as "model.layers.0.self_attn.q_proj"
    parts: tuple[LinearPart, ...]  # the parts that it computes side by side, such as queries, keys and values; often only one
    inputs: int  # the number of inputs
    transposed: bool  # as in `Row`

    @property
    def number(self) -> int:
        """The number of parts that have an adapter."""
        return sum(part.exists for part in self.parts)

    @property
    def tensors(self) -> tuple[str, str]:
        """Return the names of A and B in a folder."""
        return f"{BEFORE}{self.name}.lora_A.weight", f"{BEFORE}{self.name}.lora_B.weight"

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Return the shapes of A and B in a folder, for adapters of this rank."""
        return (rank, self.inputs), (sum(part.outputs for part in self.parts), rank)

    def joined(self, arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return A and B as a folder stores them.

        The adapters of n parts become one adapter with n times the rank, in which B has a block for each part.
        """
        columns = [np.asarray(arrays[f"{part.adapter}/a"]) for part in self.parts if part.exists]
        a = np.concatenate(columns, axis=1)
        b = np.zeros((a.shape[1], sum(part.outputs for part in self.parts)), a.dtype)
        row = column = 0
        for part in self.parts:
            if part.exists:
                block = np.asarray(arrays[f"{part.adapter}/b"])
                b[row : row + len(block), column : column + part.outputs] = block
                row += len(block)
            column += part.outputs
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)

    def divided(self, a: np.ndarray, b: np.ndarray, rank: int, where: str) -> dict[str, np.ndarray]:
        """Convert A and B of a folder to parameters, by name.

        If the module has several parts, they either share A, or the rank is the sum of their ranks and B has a block for each part. Raise
        InputError if B has numbers outside its blocks.
        """
        columns = np.split(b.T, np.cumsum([part.outputs for part in self.parts])[:-1], axis=1)
        if len(a) == rank:
            pairs = zip(self.parts, columns, strict=True)
            return {f"{part.adapter}/{name}": array for part, column in pairs for name, array in (("a", a.T), ("b", column))}
        arrays: dict[str, np.ndarray] = {}
        blank: list[slice] = []  # blocks of rows in which B is zero
        for start in range(0, len(a), rank):
            rows = slice(start, start + rank)
            used = [i for i, column in enumerate(columns) if column[rows].any()]
            names = [f"{self.parts[i].adapter}/" for i in used]
            if len(used) > 1 or any(f"{name}a" in arrays for name in names):
                raise InputError(f"{where}: expected lora_B of {self.name} with a block for each part, found other numbers; {_OTHER_RANK}")
            for i, name in zip(used, names, strict=True):
                arrays |= {f"{name}a": a.T[:, rows], f"{name}b": columns[i][rows]}
            blank += [] if used else [rows]
        free = [i for i, part in enumerate(self.parts) if f"{part.adapter}/a" not in arrays]
        if len(free) == len(blank):  # otherwise the parts of these blocks are unknown, but with B = 0 they change no output
            for i, rows in zip(free, blank, strict=True):
                arrays |= {f"{self.parts[i].adapter}/a": a.T[:, rows], f"{self.parts[i].adapter}/b": columns[i][rows]}
        return arrays


def modules_of(row: Row, names: Collection[str], model: ModelConfig) -> list[Module]:
    """Return the modules of a row of the layout that have adapters; `names` are all parameters of the model with adapters."""
    parts = {part: f"{linear}/lora/{part}" for linear, _ in _linears(row) for part in PARTS[_kind(linear)]}
    if not any(f"{adapter}/a" in names for adapter in parts.values()):
        return []
    outputs = {part: width for linear, shape in _linears(row) for part, width in widths_of(linear, shape[1], model).items()}
    inputs = next(shape[0] for _, shape in _linears(row))
    theirs = [name.removesuffix(".weight") for name in row.theirs]
    modules = []
    for name, inner in adapter_config.module_parts(theirs, [PARTS[_kind(linear)] for linear, _ in _linears(row)]):
        own = tuple(LinearPart(parts[part], outputs[part], f"{parts[part]}/a" in names) for part in inner)
        modules.append(Module(name, own, inputs, row.transposed))
    return [module for module in modules if module.number]


def _linears(row: Row) -> list[tuple[str, Shape]]:
    """Return the linear layers of a row that may have adapters, with the shapes of their kernels."""
    kernels = [(name.removesuffix("/kernel"), shape) for name, shape in row.shapes.items() if name.endswith("/kernel")]
    may_adapt = len(kernels) == len(row.shapes) and not row.is_of_experts and all(_kind(linear) in PARTS for linear, _ in kernels)
    return kernels if may_adapt else []


def _kind(linear: str) -> str:
    return linear.rpartition("/")[2]


# Reading ---------------------------------------------------------------------------------------------------------------


def with_adapters(source: Source, path: Path, base: Description, head: str, model: Mapping[str, Spec] | None = None) -> Source:
    """Add to a source the adapters of a folder in PEFT's layout, and the modules that the folder stores whole.

    Without specs of the model's parameters, these are as the adapters have them. Raise InputError if the folder cannot be read, or does not
    fit the model.
    """
    described = adapter_config.read_adapters(path, base)
    if own := next((name for name in source.specs if is_of_adapter(name)), None):
        raise InputError(f"warm_start.adapters: {source.where} has adapters of its own, '{own}'; leave out one of them")
    folder = look_into_adapters(path)
    keys = base.keys if head == base.keys.get("head", "language") else base.keys | {"head": "regression"}  # names of any head
    names = layout(base._replace(keys=keys))
    arrays = _read(folder, names, ModelConfig(**read_config.whole_section(keys)), described)
    for name, array in arrays.items():
        if model is not None and (name not in model or array.shape != model[name].shape):
            expected = f"of shape {list(model[name].shape)}" if name in model else "only parameters of the model"
            raise InputError(f"{shown(path)}: expected '{name}' {expected}, found shape {list(array.shape)}; is it of another model?")

    def read(wanted: Names) -> Iterator[dict[str, Any]]:
        for layer_id, inner in wanted.items():
            own = {name: arrays[name] for name in inner if name in arrays}
            for part in source.read({layer_id: [name for name in inner if name not in arrays]}) if len(own) < len(inner) else ({},):
                yield {name: array for name, array in part.items() if name not in arrays} | own

    def digest() -> str:
        return hashlib.sha256(f"{source.digest()} {folder.digest()}".encode()).hexdigest()

    specs = source.specs | {name: Spec(array.shape, str(array.dtype)) for name, array in arrays.items()}
    return replace(source, specs=specs, read=read, digest=digest, converts=True)


def _read(folder: Folder, names: Layout, model: ModelConfig, described: Adapters) -> dict[str, np.ndarray]:
    """Read all parameters of a folder, by name in an export."""
    where, left = shown(folder.path / ADAPTER_WEIGHTS), dict.fromkeys(folder.tensors)
    for name, (_, spec) in folder.tensors.items():
        if spec.dtype not in FLOATS.values():
            raise InputError(f"{where}: expected floating-point numbers, found {short(name)}, {spec}; use other adapters")
    wanted = {f"{linear}/lora/{part}/a" for row in names for linear, _ in _linears(row) for part in PARTS[_kind(linear)]}
    wanted = {name for name in wanted if name.split("/")[-2] in described.lora["targets"]}
    arrays: dict[str, np.ndarray] = {}
    for row in names:
        modules = modules_of(row, wanted, model)
        for module in modules:
            arrays |= module.divided(*_matrices(folder, module, described, where), described.lora["rank"], where)
            for name in module.tensors:
                del left[name]
        whole = [f"{BEFORE}{name}" for name in row.theirs]
        if all(name in left for name in whole) and not modules and not row.is_of_experts:
            arrays |= row.joined(_saved(folder, row, names, described, model.vocab_size, where))
            for name in whole:
                del left[name]
    if left:
        raise InputError(
            f"{where}: expected adapters beside linear layers of the blocks, and modules that are stored whole, found "
            f"{short(next(iter(left)))}; jpipe has no adapters for this module, and does not train it beside adapters"
        )
    return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


def _matrices(folder: Folder, module: Module, described: Adapters, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Read A and B of a module; their shapes are already checked."""
    rank, alpha = described.lora["rank"], described.lora["alpha"]
    its_rank = next((rank for name, rank in described.ranks.items() if adapter_config.is_or_ends(module.name, name)), rank)
    its_alpha = next((alpha for name, alpha in described.alphas.items() if adapter_config.is_or_ends(module.name, name)), alpha)
    times = its_rank // rank
    if its_rank != times * rank or its_alpha != times * alpha or not 1 <= times <= len(module.parts):
        raise InputError(
            f"{shown(folder.path / adapter_config.ADAPTER_CONFIG)}: rank_pattern, alpha_pattern: expected rank {rank} and alpha {alpha:g} "
            f"of {module.name}, found {its_rank} and {its_alpha:g}; {_OTHER_RANK}"
        )
    for name, shape in zip(module.tensors, module.shapes(its_rank), strict=True):
        found = folder.tensors[name][1].shape if name in folder.tensors else None
        if found != shape:
            actual = "no such tensor; in jpipe either all blocks have this adapter, or none" if found is None else f"shape {list(found)}"
            raise InputError(f"{where}: expected '{name}' of shape {list(shape)}, found {actual}; are the adapters for another model?")
    tensors = folder.read(list(module.tensors))
    a, b = (tensors[name].astype(np.float32) for name in module.tensors)
    return a, b


def _saved(folder: Folder, row: Row, names: Layout, described: Adapters, vocab_size: int, where: str) -> dict[str, np.ndarray]:
    """Read the tensors of a module that is stored whole."""
    for name in row.theirs:
        expected, found = row.theirs[name], folder.tensors[f"{BEFORE}{name}"][1].shape
        if expected[0] == vocab_size != found[0] and len(expected) == len(found):
            raise InputError(
                f"{where}: expected '{name}' of {vocab_size} tokens as in the model, found {found[0]}; the vocabulary was resized: merge "
                "the adapters with PEFT"
            )
        if not adapter_config.is_saved(name.rpartition(".")[0], described.saved):
            raise InputError(
                f"{where}: expected only whole modules that modules_to_save names, found '{name}'; add it there, or remove the tensor"
            )
        if name in names.copies.values():
            raise InputError(f"{where}: expected embeddings as in the model, which are tied, found '{name}'; merge the adapters with PEFT")
        if len(found) != len(expected):
            raise InputError(f"{where}: expected '{name}' with {len(expected)} axes, found {folder.tensors[BEFORE + name][1]}")
    tensors = folder.read([f"{BEFORE}{name}" for name in row.theirs])
    return {name: tensors[f"{BEFORE}{name}"] for name in row.theirs}
