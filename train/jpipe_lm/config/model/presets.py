"""The presets of the section `model`: published language models, and small models for experiments."""

from types import MappingProxyType
from typing import Any

_GPT_2 = {"vocab_size": 50257, "max_positions": 1024, "seq_len": 1024, "norm_epsilon": 1e-5, "tied": True, "init": "normal"}
"""Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

_LLAMA_3 = {
    **{"vocab_size": 128256, "heads": 32, "kv_heads": 8, "positions": "rope", "rope_base": 500000.0, "seq_len": 8192},
    **{"norm": "rms", "norm_epsilon": 1e-5, "activation": "silu", "gated_mlp": True, "bias": False, "init": "normal"},
}
"""Llama team 2024, "The Llama 3 Herd of Models"."""

_LIKE_LLAMA = {
    **{"positions": "rope", "norm": "rms", "norm_epsilon": 1e-6, "activation": "silu", "gated_mlp": True, "bias": False},
    "init": "normal",
}

_QWEN = {**_LIKE_LLAMA, "rope_base": 1e6}
"""Qwen team 2024, "Qwen2.5 Technical Report"; 2025, "Qwen3 Technical Report"."""

_GEMMA = {
    **{**_LIKE_LLAMA, "norm": "rms_plus_one", "post_norms": True, "activation": "gelu", "embed_scale": True, "tied": True},
    "head_size": 256,
}
"""Gemma team 2024, "Gemma 2: Improving Open Language Models at a Practical Size"; 2025, "Gemma 3 Technical Report"."""

_PAPER = {**_GPT_2, "vocab_size": 51200, "max_positions": 512, "seq_len": 512}
"""The GPTs of Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training": like GPT-2, with 512 positions."""

_BERT = {
    **{"kind": "bert", "vocab_size": 30522, "max_positions": 512, "seq_len": 512, "norm_epsilon": 1e-12},
    **{"activation": "gelu_exact", "tied": True, "init": "normal"},
}
"""Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"."""

_SMALL = {"vocab_size": 256, "depth": 2, "width": 16, "heads": 4, "max_positions": 32, "seq_len": 16}

PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "gpt2-124m": {**_GPT_2, "depth": 12, "width": 768, "heads": 12},
        "gpt2-355m": {**_GPT_2, "depth": 24, "width": 1024, "heads": 16},
        "gpt2-774m": {**_GPT_2, "depth": 36, "width": 1280, "heads": 20},
        "gpt2-1.5b": {**_GPT_2, "depth": 48, "width": 1600, "heads": 25},
        "llama-3.2-1b": {
            **{**_LLAMA_3, "depth": 16, "width": 2048, "mlp_width": 8192, "max_positions": 131072, "tied": True},
            "rope_scaling": {"factor": 32.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_positions": 8192},
        },
        "llama-3-8b": {**_LLAMA_3, "depth": 32, "width": 4096, "mlp_width": 14336, "max_positions": 8192},
        "llama-3-70b": {**_LLAMA_3, "depth": 80, "width": 8192, "heads": 64, "mlp_width": 28672, "max_positions": 8192},
        "qwen2.5-7b": {
            **{**_QWEN, "vocab_size": 152064, "depth": 28, "width": 3584, "heads": 28, "kv_heads": 4, "mlp_width": 18944, "bias": "qkv"},
            **{"max_positions": 131072, "seq_len": 8192},
        },
        "qwen3-0.6b": {
            **{**_QWEN, "vocab_size": 151936, "depth": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_size": 128},
            **{"mlp_width": 3072, "qk_norm": "head", "tied": True, "max_positions": 40960, "seq_len": 8192},
        },
        "qwen3-8b": {
            **{**_QWEN, "vocab_size": 151936, "depth": 36, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 12288},
            **{"qk_norm": "head", "max_positions": 40960, "seq_len": 8192},
        },
        "mistral-7b": {
            **{**_LIKE_LLAMA, "vocab_size": 32000, "depth": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336},
            **{"norm_epsilon": 1e-5, "window": 4096, "max_positions": 32768, "seq_len": 8192},
        },
        "gemma-2-2b": {
            **{**_GEMMA, "vocab_size": 256000, "depth": 26, "width": 2304, "heads": 8, "kv_heads": 4, "mlp_width": 9216},
            **{"window": 4096, "window_layers": [True, False], "attention_soft_cap": 50.0, "logits_soft_cap": 30.0},
            **{"max_positions": 8192, "seq_len": 8192},
        },
        "gemma-3-1b": {
            **{**_GEMMA, "vocab_size": 262144, "depth": 26, "width": 1152, "heads": 4, "kv_heads": 1, "mlp_width": 6912, "qk_norm": "head"},
            **{"window": 512, "window_layers": [True, True, True, True, True, False], "window_rope_base": 10000.0, "rope_base": 1e6},
            **{"max_positions": 32768, "seq_len": 8192},
        },
        "phi-4-mini": {
            **{**_LIKE_LLAMA, "vocab_size": 200064, "depth": 32, "width": 3072, "heads": 24, "kv_heads": 8, "mlp_width": 8192},
            **{"norm_epsilon": 1e-5, "rope_share": 0.75, "tied": True, "max_positions": 4096, "seq_len": 4096},
        },
        "smollm2-135m": {
            **{**_LIKE_LLAMA, "vocab_size": 49152, "depth": 30, "width": 576, "heads": 9, "kv_heads": 3, "mlp_width": 1536},
            **{"norm_epsilon": 1e-5, "rope_base": 100000.0, "tied": True, "max_positions": 8192, "seq_len": 8192},
        },
        "gpt-355m": {**_PAPER, "depth": 24, "width": 1024, "heads": 16},
        "gpt-1.3b": {**_PAPER, "depth": 24, "width": 2048, "heads": 16},
        "gpt-2.2b": {**_PAPER, "depth": 48, "width": 1920, "heads": 20},
        "gpt-3.8b": {**_PAPER, "depth": 48, "width": 2560, "heads": 20},
        "bert-110m": {**_BERT, "depth": 12, "width": 768, "heads": 12},
        "bert-355m": {**_BERT, "depth": 24, "width": 1024, "heads": 16},
        "gpt2-tiny": {**_GPT_2, **_SMALL},
        "mixtral-8x7b": {
            **{**_LIKE_LLAMA, "vocab_size": 32000, "depth": 32, "width": 4096, "heads": 32, "kv_heads": 8, "rope_base": 1e6},
            **{"norm_epsilon": 1e-5, "max_positions": 32768, "seq_len": 8192, "mlp_width": 14336},
            "experts": {"count": 8, "per_token": 2, "mlp_width": 14336, "balance_loss": 0.02},
        },
        "qwen3-30b-a3b": {
            **{**_QWEN, "vocab_size": 151936, "depth": 48, "width": 2048, "heads": 32, "kv_heads": 4, "head_size": 128},
            **{"qk_norm": "head", "max_positions": 40960, "seq_len": 8192, "mlp_width": 768},
            "experts": {"count": 128, "per_token": 8, "mlp_width": 768, "balance_loss": 0.001},
        },
        "olmoe-1b-7b": {
            **{**_LIKE_LLAMA, "vocab_size": 50304, "depth": 16, "width": 2048, "heads": 16, "norm_epsilon": 1e-5, "qk_norm": "all"},
            **{"max_positions": 4096, "seq_len": 4096, "mlp_width": 1024},
            "experts": {"count": 64, "per_token": 8, "mlp_width": 1024, "renormalize": False, "balance_loss": 0.01, "z_loss": 0.001},
        },
        "mixtral-tiny": {**_LLAMA_3, **_SMALL, "kv_heads": 2, "mlp_width": 24, "experts": {"count": 4, "per_token": 2, "mlp_width": 24}},
        "llama-tiny": {**_LLAMA_3, **_SMALL, "kv_heads": 2, "mlp_width": 40},
        "bert-tiny": {**_BERT, **_SMALL},
    }
)
"""The keys of `model` that each preset sets. All other keys keep the defaults of `ModelConfig`."""
