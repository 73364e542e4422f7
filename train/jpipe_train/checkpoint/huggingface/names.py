"""The names and layouts of the parameters of jpipe's models in Hugging Face's folders, in a table for each architecture.

Letters in shapes: v symbols, w width, p positions, m width of the MLP.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jpipe_train.config.huggingface import Description

Shape = tuple[int, ...]


class Row(NamedTuple):
    """A parameter of jpipe and the tensors that it is made of.

    Attributes:
        ours: its name in an export, such as "block_0/qkv/kernel".
        theirs: the names of the tensors that are concatenated along its last axis.
        shapes: the shapes of the tensors.
        transposed: whether the tensors are (outputs, inputs), as in PyTorch's `Linear`; jpipe's kernels are (inputs, outputs).
    """

    ours: str
    theirs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        shapes = [shape[::-1] if self.transposed else shape for shape in self.shapes]
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

    def joined(self, tensors: list[np.ndarray]) -> np.ndarray:
        """Return the parameter made of its tensors."""
        parts = [tensor.T if self.transposed else tensor for tensor in tensors]
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def split(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the tensors of a parameter."""
        widths = [(shape[::-1] if self.transposed else shape)[-1] for shape in self.shapes]
        parts = np.split(array, np.cumsum(widths)[:-1], axis=-1)
        return [np.ascontiguousarray(part.T if self.transposed else part) for part in parts]


@dataclass(frozen=True)
class Layout:
    """The parameters of a model in Hugging Face's layout.

    Attributes:
        rows: by layer id, in the order of the layers.
        prefix: the start of names in the whole model that a folder of the model without its head leaves out.
        copies: the names of tensors that are copies of others, by the name of the copy; a folder may have them.
        optional: the starts of the names of tensors that a folder may leave out; their parameters are then initialized.
    """

    rows: Mapping[str, tuple[Row, ...]]
    prefix: str
    copies: Mapping[str, str]
    optional: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        for rows in self.rows.values():
            yield from rows

    @cached_property
    def theirs(self) -> dict[str, Shape]:
        """The shapes of all tensors except copies, by name."""
        return {name: shape for row in self for name, shape in zip(row.theirs, row.shapes, strict=True)}

    def known_as(self, name: str) -> str | None:
        """Return the name in the table of a tensor of any version's folder; None for a constant that is not a weight."""
        if name.endswith(_BUFFERS):
            return None
        for old, new in _OLD.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        whole = f"{self.prefix}{name}"
        return whole if whole in self.theirs else name


# Constants that older versions saved, and their names of the parameters of norms.
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "embeddings.position_ids", "embeddings.token_type_ids")
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def layout(described: Description) -> Layout:
    """Return the layout of the model that a `config.json` describes."""
    build, prefix = _LAYOUTS[described.architecture]
    layers, copies = build(described.keys)
    rows = {layer_id: tuple(row._replace(ours=f"{layer_id}/{row.ours}") for row in rows) for layer_id, rows in layers.items()}
    return Layout(rows, prefix, copies, _OPTIONAL.get(described.architecture, ()))


_Layers = tuple[dict[str, list[Row]], dict[str, str]]


def _gpt2(m: Mapping[str, Any]) -> _Layers:
    v, w, table = m["vocab_size"], m["width"], "transformer.wte.weight"
    layers = {"embed": [_table("token", table, v, w), _table("position", "transformer.wpe.weight", m["max_positions"], w)]}
    for i in range(m["depth"]):
        h = f"transformer.h.{i}"
        layers[f"block_{i}"] = [
            *_norm("attention_norm", f"{h}.ln_1", w),
            *_linear("qkv", [f"{h}.attn.c_attn"], w, [3 * w], transposed=False),
            *_linear("project", [f"{h}.attn.c_proj"], w, [w], transposed=False),
            *_norm("mlp_norm", f"{h}.ln_2", w),
            *_linear("expand", [f"{h}.mlp.c_fc"], w, [m["mlp_width"]], transposed=False),
            *_linear("contract", [f"{h}.mlp.c_proj"], m["mlp_width"], [w], transposed=False),
        ]
    logits, copies = _logits(m, table)
    return layers | {"head": [*_norm("norm", "transformer.ln_f", w), *logits]}, copies


def _llama(m: Mapping[str, Any]) -> _Layers:
    v, w, table = m["vocab_size"], m["width"], "model.embed_tokens.weight"
    q, kv, wide, bias = m["heads"] * m["head_size"], m["kv_heads"] * m["head_size"], m["mlp_width"], m["bias"]
    layers = {"embed": [_table("token", table, v, w)]}
    for i in range(m["depth"]):
        h = f"model.layers.{i}"
        layers[f"block_{i}"] = [
            *_norm("attention_norm", f"{h}.input_layernorm", w, bias=False),
            *_linear("qkv", [f"{h}.self_attn.{name}_proj" for name in "qkv"], w, [q, kv, kv], bias),
            *_linear("project", [f"{h}.self_attn.o_proj"], q, [w], bias),
            *_norm("mlp_norm", f"{h}.post_attention_layernorm", w, bias=False),
            *_linear("expand", [f"{h}.mlp.up_proj"], w, [wide], bias),
            *_linear("gate", [f"{h}.mlp.gate_proj"], w, [wide], bias),
            *_linear("contract", [f"{h}.mlp.down_proj"], wide, [w], bias),
        ]
    logits, copies = _logits(m, table)
    return layers | {"head": [*_norm("norm", "model.norm", w, bias=False), *logits]}, copies


def _bert(m: Mapping[str, Any]) -> _Layers:
    v, w, before, head = m["vocab_size"], m["width"], "bert.embeddings", "cls.predictions"
    embed = [
        _table("token", f"{before}.word_embeddings.weight", v, w),
        _table("position", f"{before}.position_embeddings.weight", m["max_positions"], w),
        _table("type", f"{before}.token_type_embeddings.weight", 2, w),
        *_norm("norm", f"{before}.LayerNorm", w),
    ]
    layers = {"embed": embed}
    for i in range(m["depth"]):
        h = f"bert.encoder.layer.{i}"
        layers[f"block_{i}"] = [
            *_linear("qkv", [f"{h}.attention.self.{name}" for name in ("query", "key", "value")], w, [w, w, w]),
            *_linear("project", [f"{h}.attention.output.dense"], w, [w]),
            *_norm("attention_norm", f"{h}.attention.output.LayerNorm", w),
            *_linear("expand", [f"{h}.intermediate.dense"], w, [m["mlp_width"]]),
            *_linear("contract", [f"{h}.output.dense"], m["mlp_width"], [w]),
            *_norm("mlp_norm", f"{h}.output.LayerNorm", w),
        ]
    layers["head"] = [
        *_linear("pooler", ["bert.pooler.dense"], w, [w]),
        *_linear("next_sentence", ["cls.seq_relationship"], w, [2]),
        *_linear("transform", [f"{head}.transform.dense"], w, [w]),
        *_norm("norm", f"{head}.transform.LayerNorm", w),
        Row("logits/bias", (f"{head}.bias",), ((v,),)),
    ]
    return layers, {f"{head}.decoder.weight": f"{before}.word_embeddings.weight", f"{head}.decoder.bias": f"{head}.bias"}


_LAYOUTS: dict[str, tuple[Callable[[Mapping[str, Any]], _Layers], str]] = {
    "GPT2LMHeadModel": (_gpt2, "transformer."),
    "LlamaForCausalLM": (_llama, "model."),
    "BertForPreTraining": (_bert, "bert."),
    "BertForMaskedLM": (_bert, "bert."),
}
_OPTIONAL = {"BertForMaskedLM": ("bert.pooler.", "cls.seq_relationship.")}  # transformers leaves them out


def _table(ours: str, theirs: str, rows: int, width: int) -> Row:
    return Row(f"{ours}/embedding", (theirs,), ((rows, width),))


def _norm(ours: str, theirs: str, width: int, bias: bool = True) -> list[Row]:
    names = {"scale": "weight", "bias": "bias"} if bias else {"scale": "weight"}
    return [Row(f"{ours}/{name}", (f"{theirs}.{their_name}",), ((width,),)) for name, their_name in names.items()]


def _linear(ours: str, theirs: list[str], inputs: int, outputs: list[int], bias: bool = True, *, transposed: bool = True) -> list[Row]:
    shapes = [(size, inputs) if transposed else (inputs, size) for size in outputs]
    kernel = Row(f"{ours}/kernel", tuple(f"{name}.weight" for name in theirs), tuple(shapes), transposed)
    return [kernel, Row(f"{ours}/bias", tuple(f"{name}.bias" for name in theirs), tuple((size,) for size in outputs))][: 1 + bias]


def _logits(m: Mapping[str, Any], table: str) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of the projection to logits, and its copies if it is tied to the embedding."""
    if m["tied"]:
        return [], {"lm_head.weight": table}
    return _linear("logits", ["lm_head"], m["width"], [m["vocab_size"]], bias=False), {}
