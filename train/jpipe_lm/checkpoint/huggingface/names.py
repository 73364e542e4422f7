"""The names and layouts of jpipe's parameters in Hugging Face's folders, from the table of model families.

Letters in shapes: v symbols, w width, p positions, m width of the MLP.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jpipe_lm.config.huggingface.families import ARCHITECTURES
from jpipe_lm.config.huggingface.read_config import Description, whole_section
from jpipe_lm.config.model.delta_section import DeltaConfig
from jpipe_lm.config.model.experts_section import ExpertsConfig
from jpipe_lm.config.model.latent_section import LatentConfig
from jpipe_lm.config.model_config import ModelConfig, has_bias

Shape = tuple[int, ...]


class Row(NamedTuple):
    """Some parameters of jpipe and the tensors that store them. If either are several, they are concatenated along the last axis.

    A stacked parameter has a tensor for each expert, along its first axis. In an interleaved tensor the numbers of two parameters
    alternate.
    """

    shapes: Mapping[str, Shape]  # the shapes of the parameters by name in an export, such as "block_0/qkv/kernel"
    theirs: Mapping[str, Shape]  # the shapes of the tensors, by name
    transposed: bool = False  # whether the tensors are (outputs, inputs), as in PyTorch's `Linear`; jpipe's kernels are (inputs, outputs)
    stacked: bool = False  # whether there is a tensor for each expert
    interleaved: bool = False  # whether the numbers of two parameters alternate in the tensor

    @property
    def is_of_experts(self) -> bool:
        """Whether a parameter has the kernels of all experts of a block."""
        return any(len(shape) > 2 for shape in self.shapes.values())

    def joined(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert tensors to parameters."""
        parts = [tensors[name].T if self.transposed else tensors[name] for name in self.theirs]
        if self.stacked:
            return dict.fromkeys(self.shapes, np.stack(parts))
        if self.interleaved:
            (whole,) = parts
            parts = [whole[..., ::2], whole[..., 1::2]]
        return _divided(parts, self.shapes)

    def split(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Convert parameters to tensors."""
        if self.stacked:
            (ours,) = self.shapes
            each = zip(self.theirs, np.asarray(arrays[ours]), strict=True)
            return {name: np.ascontiguousarray(part.T if self.transposed else part) for name, part in each}
        if self.interleaved:
            (tensor,) = self.theirs
            return {tensor: np.stack([np.asarray(arrays[name]) for name in self.shapes], axis=-1).reshape(self.theirs[tensor])}
        shapes = {name: shape[::-1] if self.transposed else shape for name, shape in self.theirs.items()}
        divided = _divided([np.asarray(arrays[name]) for name in self.shapes], shapes)
        return {name: np.ascontiguousarray(part.T) if self.transposed else part for name, part in divided.items()}


def _divided(parts: list[np.ndarray], shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Concatenate arrays along the last axis, and divide the result into arrays of these shapes."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    ends = np.cumsum([shape[-1] for shape in shapes.values()])[:-1]
    return {name: np.ascontiguousarray(part) for name, part in zip(shapes, np.split(whole, ends, axis=-1), strict=True)}


@dataclass(frozen=True)
class Layout:
    """The parameters of a model in Hugging Face's layout."""

    rows: Mapping[str, tuple[Row, ...]]  # the rows by layer id, in the order of the layers
    prefix: str  # what names in a whole model begin with; a folder of the model without its head leaves this out
    copies: Mapping[str, str]  # a mapping from a tensor that is a copy to its original; a folder may have the copy
    # what the names of optional tensors begin with. If a folder leaves them out, their parameters are initialized.
    optional: tuple[str, ...] = ()
    unread: str | None = None  # what names of further blocks, which are not read, begin with, with {} for the number of the block
    depth: int = 0  # the number of blocks

    def __iter__(self) -> Iterator[Row]:
        for rows in self.rows.values():
            yield from rows

    @cached_property
    def theirs(self) -> dict[str, Shape]:
        """The shapes of all tensors except copies, by name."""
        return {name: shape for row in self for name, shape in row.theirs.items()}

    def known_as(self, name: str) -> str | None:
        """Return a tensor's name in the table, for a folder of any version; None for a constant that is not a weight."""
        name = name.replace("language_model.", "", 1)
        if name.endswith(_BUFFERS) or name.removeprefix("model.").startswith(_OTHERS) or self._is_unread(name):
            return None
        for old, new in _OLD.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        whole = f"{self.prefix}{name}"
        return whole if whole in self.theirs else name

    def _is_unread(self, name: str) -> bool:
        """Return whether a tensor belongs to a further block."""
        start, _, end = (self.unread or "").partition("{}")
        number = name.removeprefix(start).partition(end or ".")[0]
        return bool(start) and name.startswith(start) and number.isdecimal() and int(number) >= self.depth


# Constants that older versions saved, and the older names of norm parameters.
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "embeddings.position_ids", "embeddings.token_type_ids")
# Parts of models that also read images or sounds, or predict several tokens, beside their language model.
_OTHERS = ("audio_tower.", "embed_audio.", "embed_vision.", "mtp.", "multi_modal_projector.", "vision_model.", "vision_tower.", "visual.")
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def layout(described: Description) -> Layout:
    """Return the layout of the model that a `config.json` describes."""
    names, config = ARCHITECTURES[described.architecture].tensors, ModelConfig(**whole_section(described.keys))
    is_language = config.head == "language"
    copies = dict(names.copies) if is_language else {}
    layers = {"embed": ("", names.embed, _embed(config))}
    for i, block in enumerate(config.blocks):
        sizes = _block(block)
        present = {ours: theirs for ours, theirs in names.block.items() if all(name in sizes for name in ours.split(","))}
        layers[f"block_{i}"] = names.layer.format(i), present, sizes
    head = dict(names.head if is_language else names.scores)
    if is_language and config.tied and (logits := head.pop("logits", None)) is not None:
        copies[f"{logits}.weight"] = f"{names.embed['token']}.weight"
    layers["head"] = "", head, _head(config)
    rows = {}
    for layer_id, (start, of_layer, shapes) in layers.items():
        turned = names.transposed or layer_id == "head"
        rows[layer_id] = tuple(
            row
            for ours, theirs in of_layer.items()
            for row in _rows(layer_id, ours.split(","), [start + name for name in theirs.split(",")], shapes, turned)
        )
    unread = names.layer if names.has_further_blocks else None
    return Layout(rows, names.prefix, copies, names.optional.get(described.architecture, ()), unread, config.depth)


class _Sizes(NamedTuple):
    """The sizes of a layer's parameters with one name."""

    inputs: int | None  # the inputs of a linear layer, or the rows of a table; None for a norm or a bias alone
    outputs: tuple[int, ...]  # the sizes of the tensors along the last axis
    bias: bool  # whether the layer has a bias
    kernel: str  # jpipe's name of the first parameter
    experts: int = 0  # the number of experts with such a layer; 0 for a layer without experts
    first: Shape = ()  # the first dimensions of a single parameter


def _embed(c: ModelConfig) -> dict[str, _Sizes]:
    tables = {"token": c.vocab_size, "position": c.max_positions_used, "type": 2}
    return {**{name: _Sizes(rows, (c.width,), False, "embedding") for name, rows in tables.items()}, "norm": _norm(c, c.width)}


def _block(c: ModelConfig) -> dict[str, _Sizes]:
    w, m = c.width, c.mlp_width_used
    norms = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")
    return {
        **{name: _norm(c, w) for name in norms},
        **_mixer(c),
        "scale": _single(1),
        **(_mlp(w, m, has_bias(c.bias, "mlp")) if c.experts is None else _experts(w, c.experts)),
    }


def _mixer(c: ModelConfig) -> dict[str, _Sizes]:
    """Return the sizes of the parameters of attention, or of what is in its place."""
    if c.delta is not None:
        return _delta(c, c.delta)
    q, kv, *_ = c.qkv_sizes if c.qk_norm == "all" else (c.head_size_used,) * 2
    return {
        **{"query_norm": _norm(c, q), "key_norm": _norm(c, kv), "sinks": _single(c.heads)},
        **({"qkv": _Sizes(c.width, c.qkv_sizes, has_bias(c.bias, "qkv"), "kernel")} if c.latent is None else _latents(c, c.latent)),
        "project": _Sizes(c.heads * c.value_size, (c.width,), has_bias(c.bias, "project"), "kernel"),
    }


def _linear(inputs: int, outputs: int) -> _Sizes:
    return _Sizes(inputs, (outputs,), False, "kernel")


def _scale(size: int) -> _Sizes:
    return _Sizes(None, (size,), False, "scale")


def _delta(c: ModelConfig, delta: DeltaConfig) -> dict[str, _Sizes]:
    w, heads, values = c.width, delta.value_heads, delta.value_heads * delta.value_size
    sizes = {"inputs": _linear(w, delta.channels), "output_gate": _linear(w, values), "rate": _linear(w, heads), "decay": _linear(w, heads)}
    sizes |= {"convolution": _single(delta.convolution, delta.channels, 1), "decay_log": _single(heads), "decay_bias": _single(heads)}
    sizes |= {"norm": _scale(delta.value_size), "output": _linear(values, w)}
    return {f"delta/{name}": size for name, size in sizes.items()}


def _latents(c: ModelConfig, latent: LatentConfig) -> dict[str, _Sizes]:
    q, still = c.heads * c.head_size_used, c.head_size_used - latent.rotary
    sizes = {"down": _linear(c.width, latent.keys + latent.rotary), "norm": _scale(latent.keys)}
    sizes["up"] = _linear(latent.keys, c.heads * (still + latent.values))
    if latent.queries is None:
        sizes["query"] = _linear(c.width, q)
    else:
        sizes |= {"query_down": _linear(c.width, latent.queries), "query_norm": _scale(latent.queries)}
        sizes["query_up"] = _linear(latent.queries, q)
    return {f"latents/{name}": size for name, size in sizes.items()}


def _mlp(w: int, m: int, bias: bool, experts: int = 0) -> dict[str, _Sizes]:
    into, back = _Sizes(w, (m,), bias, "kernel", experts), _Sizes(m, (w,), bias, "kernel", experts)
    return {"expand": into, "gate": into, "contract": back}


def _experts(w: int, e: ExpertsConfig) -> dict[str, _Sizes]:
    m = e.mlp_width
    sizes = {"router": _Sizes(w, (e.count,), e.bias, "kernel"), **_mlp(w, m, False, e.count), "correction": _single(e.count)}
    for name, (inputs, outputs) in {"expand": (w, m), "gate": (w, m), "contract": (m, w)}.items():
        sizes |= {f"{name}/kernel": _single(outputs, e.count, inputs), f"{name}/bias": _single(outputs, e.count)}
    if e.shared_mlp_width is not None:
        sizes |= {f"shared/{name}": size for name, size in _mlp(w, e.shared_mlp_width, False).items()}
        sizes |= {"shared/share": _Sizes(w, (1,), False, "kernel")} if e.shared_gate else {}
    return {f"experts/{name}": size for name, size in sizes.items()}


def _head(c: ModelConfig) -> dict[str, _Sizes]:
    scores = (c.label_count or 1) if c.head == "classification" else 1
    linear = {
        **{"logits": (c.vocab_size, False), "pooler": (c.width, True), "transform": (c.width, True), "next_sentence": (2, True)},
        "score": (scores, c.kind == "bert"),
    }
    return {
        **{name: _Sizes(c.width, (outputs,), bias, "kernel") for name, (outputs, bias) in linear.items()},
        "norm": _norm(c, c.width),
        "logits/bias": _single(c.vocab_size),
    }


def _single(size: int, *first: int) -> _Sizes:
    """Return the sizes of a single parameter, of shape (*first, size)."""
    return _Sizes(None, (size,), False, "", first=first)


def _norm(c: ModelConfig, size: int) -> _Sizes:
    return _Sizes(None, (size,), c.norm == "layer", "scale")


def _rows(layer_id: str, ours: list[str], theirs: list[str], sizes: Mapping[str, _Sizes], transposed: bool) -> Iterator[Row]:
    """Yield one row for the kernels and one for the biases that are stored together."""
    first = sizes[ours[0]]
    outputs = {name: sum(sizes[name].outputs) for name in ours}
    parts = tuple(size for name in ours for size in sizes[name].outputs)
    theirs = theirs[: len(parts)]  # if keys are also the values, these have no tensor
    stored = parts if len(theirs) == len(parts) else (sum(parts),)
    if not first.kernel:  # single parameters
        tensor, _, how = theirs[0].partition(":")
        singles = {f"{layer_id}/{name}": (*first.first, size) for name, size in outputs.items()}
        yield Row(singles, {tensor: (*first.first, sum(parts))}, interleaved=how == "interleaved")
        return
    turned = transposed and first.kernel == "kernel"

    def shape_of(size: int) -> Shape:
        return (size,) if first.inputs is None else (first.inputs, size)

    if first.experts:
        shape = shape_of(first.outputs[0])
        of_experts = {f"{theirs[0].replace('*', str(e))}.weight": shape[::-1] if turned else shape for e in range(first.experts)}
        yield Row({f"{layer_id}/{ours[0]}/kernel": (first.experts, *shape)}, of_experts, turned, stacked=True)
        return
    kernels = {f"{layer_id}/{name}/{first.kernel}": shape_of(size) for name, size in outputs.items()}
    tensors = {f"{name}.weight": shape_of(size)[::-1] if turned else shape_of(size) for name, size in zip(theirs, stored, strict=True)}
    yield Row(kernels, tensors, turned)
    if first.bias:
        biases = {f"{layer_id}/{name}/bias": (size,) for name, size in outputs.items()}
        yield Row(biases, {f"{name}.bias": (size,) for name, size in zip(theirs, stored, strict=True)})
