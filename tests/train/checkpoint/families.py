"""Tiny models of each family in Hugging Face's layout: the content of `config.json`, as transformers names it."""

from typing import Any

SYMBOLS, LENGTH = 64, 12

SIZES = {
    **{"vocab_size": SYMBOLS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None},
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0}
LONG = {
    "rope_type": "longrope",
    **{"short_factor": [1.0, 1.25, 1.5], "long_factor": [1.5, 3.0, 6.0], "original_max_position_embeddings": 8},
}
PHI = {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1, "original_max_position_embeddings": 8}
GEMMA = {**SIZES, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 5}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}


def base(theta: float, scaling: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the rotary positions of a model."""
    return {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta, **more}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaForCausalLM", {**SIZES, **base(500.0, LLAMA3), "attention_bias": True}),
    "llama-linear": ("LlamaForCausalLM", {**SIZES, **base(500.0, {"rope_type": "linear", "factor": 3.0}), "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**SIZES, **base(100.0), "sliding_window": 4, "head_dim": 6}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, **base(100.0, YARN), **WINDOWS, "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, **base(100.0), "head_dim": 8}),
    "qwen3-windows": (
        "Qwen3ForCausalLM",
        {
            **{**SIZES, **base(100.0, {**YARN, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.7}), **WINDOWS, "head_dim": 8},
            **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_bias": True},
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, **base(100.0), "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **{**GEMMA, "num_hidden_layers": 4, "rope_parameters": BY_LAYER},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3ForCausalLM", {**PHI, **base(100.0, LONG, partial_rotary_factor=0.75), "sliding_window": 5}),
    "phi3-short": (
        "Phi3ForCausalLM",
        {
            **{**PHI, **base(100.0, {**LONG, "original_max_position_embeddings": 16}, partial_rotary_factor=0.75)},
            **{"original_max_position_embeddings": 16, "tie_word_embeddings": True},
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {**SIZES, **base(100.0), **WINDOWS, "no_rope_layers": [1, 0, 1]}),
}
"""Architecture and keys by name. Windows are shorter than a row, and a row is longer than the positions before most scalings."""
