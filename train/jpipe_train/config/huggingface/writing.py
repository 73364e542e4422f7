"""Write the section `model` as the `config.json` of a folder in Hugging Face's layout."""

import json
from collections.abc import Mapping
from typing import Any

from jpipe import InputError
from jpipe_train.config.config import ModelConfig
from jpipe_train.config.huggingface.schemas import ACTIVATIONS, SCALING

_MODEL_TYPES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "BertForPreTraining": "bert"}  # the architectures that are written


def to_json_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the content of `config.json` for a model of jpipe's, without the dtype.

    Raises:
        InputError: no architecture can express the model; the message names the keys that differ.
    """
    if model.target is not None:
        raise InputError(f"--layout huggingface: expected a built-in model, found one of '{model.target}'; leave out --layout")
    keys = _keys_of(model)
    differences = {name: _differences(keys, needed(keys)) for name, needed in _NEEDED.items()}
    chosen = next((name for name, different in differences.items() if not different), None)
    if chosen is None:
        nearest = sorted(differences.items(), key=lambda item: len(item[1]))
        words = "; ".join(f"{name} has {', '.join(different)}" for name, different in nearest)
        raise InputError(f"--layout huggingface: no architecture is this model: {words}; leave out --layout")
    return {"architectures": [chosen], "model_type": _MODEL_TYPES[chosen], **_WRITERS[chosen](keys)}


def _keys_of(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of `model` with derived defaults filled in."""
    keys = model.model_dump()
    derived = {
        "kv_heads": model.heads,
        "head_size": model.width // model.heads,
        "mlp_width": 4 * model.width,
        "max_positions": model.seq_len,
    }
    return keys | {key: value for key, value in derived.items() if keys[key] is None}


def _differences(keys: Mapping[str, Any], needed: Mapping[str, Any]) -> list[str]:
    differences = [f"model.{key} {json.dumps(value)}, not {json.dumps(keys[key])}" for key, value in needed.items() if keys[key] != value]
    if keys["width"] % keys["heads"]:  # even for Llama, whose config has the head size
        differences.append(f"model.heads that divide model.width {keys['width']}, not {keys['heads']}")
    return differences


def _needed_gpt2(keys: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {"kind": "decoder", "positions": "learned", "norm": "layer", "gated_mlp": False, "bias": True}
    return fixed | {"kv_heads": keys["heads"], "head_size": keys["width"] // keys["heads"]}


def _needed_llama(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "decoder", "positions": "rope", "norm": "rms", "gated_mlp": True}


def _needed_bert(keys: Mapping[str, Any]) -> dict[str, Any]:
    return _needed_gpt2(keys) | {"kind": "bert", "tied": True}


def _gpt2_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": keys["vocab_size"],
        "n_layer": keys["depth"],
        "n_embd": keys["width"],
        "n_head": keys["heads"],
        "n_positions": keys["max_positions"],
        "n_inner": keys["mlp_width"],
        "activation_function": ACTIVATIONS[keys["activation"]][0],
        "layer_norm_epsilon": keys["norm_epsilon"],
        "tie_word_embeddings": keys["tied"],
    }


def _llama_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    scaling = keys["rope_scaling"]
    rope = {"rope_type": "llama3", **{SCALING[key]: value for key, value in scaling.items()}} if scaling else None
    return {
        **_transformer_json(keys),
        "num_key_value_heads": keys["kv_heads"],
        "head_dim": keys["head_size"],
        "rms_norm_eps": keys["norm_epsilon"],
        "rope_theta": keys["rope_base"],  # this and rope_scaling for transformers before 5, rope_parameters for later ones
        "rope_scaling": rope,
        "rope_parameters": {"rope_type": "default", **(rope or {}), "rope_theta": keys["rope_base"]},
        "attention_bias": keys["bias"],
        "mlp_bias": keys["bias"],
        "tie_word_embeddings": keys["tied"],
    }


def _bert_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {**_transformer_json(keys), "layer_norm_eps": keys["norm_epsilon"], "type_vocab_size": 2, "tie_word_embeddings": True}


def _transformer_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that Llama and BERT share."""
    return {
        "vocab_size": keys["vocab_size"],
        "num_hidden_layers": keys["depth"],
        "hidden_size": keys["width"],
        "num_attention_heads": keys["heads"],
        "intermediate_size": keys["mlp_width"],
        "max_position_embeddings": keys["max_positions"],
        "hidden_act": ACTIVATIONS[keys["activation"]][0],
    }


_NEEDED = {"GPT2LMHeadModel": _needed_gpt2, "LlamaForCausalLM": _needed_llama, "BertForPreTraining": _needed_bert}
_WRITERS = {"GPT2LMHeadModel": _gpt2_json, "LlamaForCausalLM": _llama_json, "BertForPreTraining": _bert_json}
