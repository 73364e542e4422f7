"""Tiny models of each family in Hugging Face's layout: the content of `config.json`, as transformers names it."""

from typing import Any

SYMBOLS, LENGTH = 64, 12


def _sizes(vocab: int, width: int, depth: int, heads: int, kv_heads: int, mlp: int, positions: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocab, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    return {**sizes, "num_key_value_heads": kv_heads, "intermediate_size": mlp, "max_position_embeddings": positions}


_COMMON = {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2], "initializer_range": 0.02, "torch_dtype": "bfloat16"}
_SILU = {**_COMMON, "hidden_act": "silu", "use_cache": True, "transformers_version": "4.51.0"}
_OF_GEMMA = {
    **{**_COMMON, "attention_bias": False, "cache_implementation": "hybrid", "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
    **{"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "pad_token_id": 0},
}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-7b": (
        "Qwen2ForCausalLM",
        {
            **{**_sizes(152064, 3584, 28, 28, 4, 18944, 131072), **_SILU, "max_window_layers": 28, "rms_norm_eps": 1e-06},
            **{"rope_theta": 1000000.0, "sliding_window": 131072, "use_mrope": False, "use_sliding_window": False},
        },
    ),
    "qwen3-0.6b": (
        "Qwen3ForCausalLM",
        {
            **{**_sizes(151936, 1024, 28, 16, 8, 3072, 40960), **_SILU, "attention_bias": False, "head_dim": 128, "max_window_layers": 28},
            **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True},
        },
    ),
    "qwen3-8b": (
        "Qwen3ForCausalLM",
        {
            **{**_sizes(151936, 4096, 36, 32, 8, 12288, 40960), **_SILU, "attention_bias": False, "head_dim": 128, "max_window_layers": 36},
            **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False},
        },
    ),
    "mistral-7b": (
        "MistralForCausalLM",
        {**_sizes(32000, 4096, 32, 32, 8, 14336, 32768), **_SILU, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096},
    ),
    "gemma-2-2b": (
        "Gemma2ForCausalLM",
        {
            **{**_sizes(256000, 2304, 26, 8, 4, 9216, 8192), **_OF_GEMMA, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0},
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
        },
    ),
    "gemma-3-1b": (
        "Gemma3ForCausalLM",
        {
            **{**_sizes(262144, 1152, 26, 4, 1, 6912, 32768), **_OF_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
            **{"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512},
            "sliding_window_pattern": 6,
        },
    ),
    "smollm2-135m": (
        "LlamaForCausalLM",
        {
            **{**_sizes(49152, 576, 30, 9, 3, 1536, 8192), **_SILU, "attention_bias": False, "is_llama_config": True, "pretraining_tp": 1},
            **{"rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True},
        },
    ),
}
"""Architecture and keys of published models, by the preset that is the same model."""

SIZES = {
    **{"vocab_size": SYMBOLS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None},
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4}
ROUTED = {"num_experts_per_tok": 3, "output_router_logits": True, "router_aux_loss_coef": 0.5}
CORRECTED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 2, "n_group": 4, "topk_group": 2},
    **{"routed_scaling_factor": 1.5, "first_k_dense_replace": 1},
}
LATENT = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "v_head_dim": 6, "qk_nope_head_dim": 4}
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
PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
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
    "mixtral": ("MixtralForCausalLM", {**SIZES, **base(100.0), "num_local_experts": 4, "sliding_window": 4, "head_dim": 6}),
    "olmoe": ("OlmoeForCausalLM", {**SIZES, **base(100.0), **ROUTED, "num_experts": 6, "norm_topk_prob": True, "eos_token_id": None}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            **{**SIZES, **base(100.0), "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
            **{"shared_expert_intermediate_size": 20, "decoder_sparse_step": 2},
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            **{**SIZES, **base(100.0), **ROUTED, "num_experts": 8, "moe_intermediate_size": 12, "head_dim": 8},
            **{"norm_topk_prob": True, "mlp_only_layers": [1]},
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
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            **{**SIZES, **base(100.0, {**YARN, "truncate": False}), **ROUTED, "num_local_experts": 6, "head_dim": 6, "sliding_window": 4},
            **{"layer_types": ["sliding_attention", "full_attention", "full_attention"], "attention_bias": True},
        },
    ),
    "glm4": ("Glm4ForCausalLM", {**SIZES, **base(100.0, partial_rotary_factor=0.5), "head_dim": 8, "attention_bias": True}),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        {**SIZES, **base(100.0, partial_rotary_factor=0.5), **CORRECTED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        {
            **{**SIZES, **base(100.0, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}), **CORRECTED, **LATENT},
            **{"num_key_value_heads": 4, "q_lora_rank": 12},
        },
    ),
    "deepseek-direct": (
        "DeepseekV3ForCausalLM",
        {**SIZES, **base(100.0), **CORRECTED, **LATENT, "num_key_value_heads": 4, "q_lora_rank": None, "rope_interleave": False},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            **{
                **SIZES,
                "head_dim": 8,
                "sliding_window": 4,
                "num_hidden_layers": 4,
                "rope_parameters": PROPORTIONAL,
                "num_key_value_heads": 4,
            },
            **{"global_head_dim": 12, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
            **{"final_logit_softcapping": 3.0, "tie_word_embeddings": True},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        {
            **{**SIZES, **base(100.0, partial_rotary_factor=0.5), "head_dim": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 8},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            **{**SIZES, **base(100.0, LLAMA3), "head_dim": 6, "attention_chunk_size": 4, "floor_scale": 3, "attn_scale": 0.3},
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size_mlp": 20, "moe_layers": [1, 2]},
            **{"no_rope_layers": [1, 0, 1], "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {**SIZES, **base(100.0), **WINDOWS, "no_rope_layers": [1, 0, 1]}),
}
"""Architecture and keys by name. Windows are shorter than a row, and a row is longer than the positions before most scalings."""
