"""The presets of the section `model`: published language models, and small ones for experiments."""

from types import MappingProxyType
from typing import Any

_GPT_2 = {"vocab_size": 50257, "max_positions": 1024, "seq_len": 1024, "norm_epsilon": 1e-5, "tied": True, "init": "normal"}
"""Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

_LLAMA_3 = {
    **{"vocab_size": 128256, "heads": 32, "kv_heads": 8, "positions": "rope", "rope_base": 500000.0, "seq_len": 8192},
    **{"norm": "rms", "norm_epsilon": 1e-5, "activation": "silu", "gated_mlp": True, "bias": False, "init": "normal"},
}
"""Llama team 2024, "The Llama 3 Herd of Models"."""

_PAPER = {**_GPT_2, "vocab_size": 51200, "max_positions": 512, "seq_len": 512}
"""The GPTs of Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training": as GPT-2, with 512 positions."""

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
        "gpt-355m": {**_PAPER, "depth": 24, "width": 1024, "heads": 16},
        "gpt-1.3b": {**_PAPER, "depth": 24, "width": 2048, "heads": 16},
        "gpt-2.2b": {**_PAPER, "depth": 48, "width": 1920, "heads": 20},
        "gpt-3.8b": {**_PAPER, "depth": 48, "width": 2560, "heads": 20},
        "bert-110m": {**_BERT, "depth": 12, "width": 768, "heads": 12},
        "bert-355m": {**_BERT, "depth": 24, "width": 1024, "heads": 16},
        "gpt2-tiny": {**_GPT_2, **_SMALL},
        "llama-tiny": {**_LLAMA_3, **_SMALL, "kv_heads": 2, "mlp_width": 40},
        "bert-tiny": {**_BERT, **_SMALL},
    }
)
"""The keys of `model` by preset; all others keep the defaults of `ModelConfig`."""
