"""The families of language models in Hugging Face's folders. A table has one row for each family, for reading and writing.

A row lists the keys that `config.json` may have and their meaning, the keys that do not change what the model computes, the keys of `model`
that all models of the family share, and the names of tensors. Any other key is an error, because it may change the model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from jpipe_lm.config.huggingface.experts_config import corrected_experts, experts, input_weighing_experts
from jpipe_lm.config.huggingface.parts import (
    Depth,
    KeyGroup,
    Number,
    Size,
    activation,
    attention_scale,
    biases,
    chunks,
    every_second_window,
    flag,
    full_attention,
    gated_delta,
    latents,
    later_windows,
    layers_without_rope,
    one,
    only,
    window,
    windows_between,
    without_windows,
    written,
)
from jpipe_lm.config.huggingface.rope_config import KINDS, rope, rope_by_layer


@dataclass(frozen=True)
class Tensors:
    """Mappings from the names of jpipe's parameters to the names of a family's tensors.

    Tensors are concatenated if their names are joined by commas, and so are parameters: Phi-3 has `gate,expand` in one tensor. A `*` stands
    for the number of an expert; each expert has its own tensor. Names of parameters that a block lacks are ignored.

    A name names a layer, with a kernel and perhaps a bias; or a single parameter, such as `experts/expand/kernel`, and the name of
    its tensor is complete. After a colon stands how this tensor differs: `interleaved`, if the numbers of two parameters alternate.
    """

    embed: Mapping[str, str]  # the names in the layer `embed`
    layer: str  # the prefix of the names in a block, with {} for the number of the block
    block: Mapping[str, str]  # the names in a block, without the prefix
    head: Mapping[str, str]  # the names in the layer `head` of a language model
    scores: Mapping[str, str]  # the names in the layer `head` of a model that judges whole texts
    prefix: str  # a prefix of names that folders of the model without its head leave out
    # whether the kernels of blocks have shape (outputs, inputs), as in PyTorch's `Linear`. The kernels of heads always do.
    transposed: bool = True
    # a mapping from tensors that are copies to the tensors that they copy. A folder may have the copies.
    copies: Mapping[str, str] = field(default_factory=dict)
    # for each architecture, prefixes of the names of tensors that a folder may lack. Their parameters are then initialized.
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_further_blocks: bool = False  # whether a folder may have further blocks, which predict further tokens and are not read


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    architectures: tuple[str, ...]  # the architecture names of language models in `config.json`; the first name is written
    # for other values of `model.head`, the architecture name. Classification and regression share the name of classification.
    judges: Mapping[str, str]
    model_type: str  # the name of the family in `config.json`
    parts: tuple[KeyGroup, ...]  # groups of JSON keys and their meaning
    # keys of `model` that are the same in all models of the family. All keys that are not determined have their defaults.
    fixed: Mapping[str, Any]
    tensors: Tensors  # the names of the tensors
    ignored: frozenset[str] = frozenset()  # JSON keys, in addition to `IGNORED`, that do not change what the model computes


IGNORED = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "dtype", "torch_dtype"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class"),
        *("initializer_range", "use_cache", "attention_dropout", "hidden_dropout", "auto_map", "attn_implementation", "use_bfloat16"),
        *("_attn_implementation", "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict"),
        *("torchscript", "_flash_attn_2_enabled"),
        *("chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        # Defaults for generation, which older versions of transformers stored here.
        *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids"),
        # Keys that PretrainedConfig of transformers 1 to 4 wrote into each file.
        *("_num_labels", "output_past", "xla_device", "tf_legacy_loss", "output_hiddend_states", "eos_token_ids", "gradient_checkpointing"),
        *("encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
        *("cache_implementation", "prefix", "transformers.js_config", "unsloth_version", "unsloth_fixed"),
    }
)
"""JSON keys that do not change what the model computes, whatever their values are, with one exception: when transformers trains, the
embedding of `pad_token_id` gets no gradient from the inputs."""

COMMON = (
    one("vocab_size", "vocab_size", Size),
    *(only(key, False) for key in ("is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder")),
    *(only(key, None) for key in ("quantization_config", "cross_attention_hidden_size", "per_layer_config")),
    KeyGroup({"pruned_heads": (Annotated[dict[str, Any], Field(max_length=0)], {})}, lambda *_: {}, lambda _: {}),
)
"""The key groups that all families have."""


def _sizes(positions: Any = ...) -> tuple[KeyGroup, ...]:
    return (
        one("num_hidden_layers", "depth", Depth),
        one("hidden_size", "width", Size),
        one("num_attention_heads", "heads", Size),
        one("intermediate_size", "mlp_width", Size),
        one("max_position_embeddings", "max_positions", Size, positions),
    )


def _head_size(default: int | None) -> KeyGroup:
    return one("head_dim", "head_size", Size | None, default)


_GPT_2 = {"kind": "decoder", "positions": "learned", "norm": "layer", "gated_mlp": False, "bias": True}
_LLAMA = {"kind": "decoder", "positions": "rope", "norm": "rms", "gated_mlp": True, "bias": False}
_GEMMA = {"norm": "rms_plus_one", "post_norms": True, "embed_scale": True}
_SILU, _GELU = activation("hidden_act", "silu"), activation("hidden_activation", "gelu_pytorch_tanh")
_WITHOUT_WINDOWS = only("use_sliding_window", False), without_windows()

_ATTENTION = {"qkv": "self_attn.q_proj,self_attn.k_proj,self_attn.v_proj", "project": "self_attn.o_proj"}
_MLP = {"expand": "mlp.up_proj", "gate": "mlp.gate_proj", "contract": "mlp.down_proj"}
_EXPERTS = {
    **{"experts/router": "mlp.gate", "experts/expand": "mlp.experts.*.up_proj"},
    **{"experts/gate": "mlp.experts.*.gate_proj", "experts/contract": "mlp.experts.*.down_proj"},
}
_SHARED_EXPERT = {
    **{"experts/shared/expand": "mlp.shared_expert.up_proj", "experts/shared/gate": "mlp.shared_expert.gate_proj"},
    **{"experts/shared/contract": "mlp.shared_expert.down_proj", "experts/shared/share": "mlp.shared_expert_gate"},
}
_CORRECTED_EXPERTS = {
    **{**_EXPERTS, "experts/correction": "mlp.gate.e_score_correction_bias", "experts/shared/expand": "mlp.shared_experts.up_proj"},
    **{"experts/shared/gate": "mlp.shared_experts.gate_proj", "experts/shared/contract": "mlp.shared_experts.down_proj"},
}
_LATENTS = {
    **{"latents/query": "self_attn.q_proj", "latents/query_down": "self_attn.q_a_proj", "latents/query_up": "self_attn.q_b_proj"},
    **{"latents/query_norm": "self_attn.q_a_layernorm", "latents/down": "self_attn.kv_a_proj_with_mqa"},
    **{"latents/norm": "self_attn.kv_a_layernorm", "latents/up": "self_attn.kv_b_proj"},
}
_DELTA = {
    **{"delta/inputs": "linear_attn.in_proj_qkv", "delta/output_gate": "linear_attn.in_proj_z", "delta/rate": "linear_attn.in_proj_b"},
    **{"delta/decay": "linear_attn.in_proj_a", "delta/decay_log": "linear_attn.A_log", "delta/decay_bias": "linear_attn.dt_bias"},
    **{"delta/convolution": "linear_attn.conv1d.weight", "delta/norm": "linear_attn.norm", "delta/output": "linear_attn.out_proj"},
}
_JOINED_MLP = {"gate,expand": "mlp.gate_up_proj", "contract": "mlp.down_proj"}
_QK_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_TWO_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    **{"attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm"},
    **{"mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
}


_LIKE_LLAMA = (_TWO_NORMS, _ATTENTION, _MLP)


def _experts_of_qwen(defaults: tuple[int, int, float], width: int, shared: bool = False) -> KeyGroup:
    names = "num_experts", "num_local_experts"
    return experts(names, "moe_intermediate_size", defaults=defaults, width_default=width, dense_layers=True, shared=shared)


def _like_llama(
    name: str,
    model_type: str,
    *groups: KeyGroup,
    blocks: Iterable[Mapping[str, str]] = _LIKE_LLAMA,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    ignored: Iterable[str] = (),
    epsilon: float = 1e-6,
    tied: bool = False,
    kv_heads: Any = ...,
    positions: Any = ...,
    judge: str | None = "{}ForSequenceClassification",
    older_names: tuple[str, ...] = (),
    has_further_blocks: bool = False,
) -> Family:
    """Return the row of a family with the keys and tensors of Llama and its successors.

    Args:
        name: what the names of its architectures begin with.
        groups: the key groups that it has besides.
        blocks: the names of tensors in a block.
        fixed: the keys of `model` that differ from Llama's.
        kv_heads: the default of the number of key and value heads; with None it is the number of heads.
        judge: the architecture that classifies whole texts, with {} for the name; None if there is none.
    """
    epsilons, tie = one("rms_norm_eps", "norm_epsilon", Number, epsilon), one("tie_word_embeddings", "tied", bool, tied)
    heads = one("num_key_value_heads", "kv_heads", Size | None, kv_heads)
    tensors = Tensors(
        {"token": "model.embed_tokens"},
        "model.layers.{}.",
        {ours: theirs for part in blocks for ours, theirs in part.items()},
        {"norm": "model.norm", "logits": "lm_head"},
        {"norm": "model.norm", "score": "score"},
        "model.",
        has_further_blocks=has_further_blocks,
    )
    architectures, judges = (f"{name}ForCausalLM", *older_names), {} if judge is None else {"classification": judge.format(name)}
    parts = *_sizes(positions), heads, epsilons, tie, *groups
    return Family(architectures, judges, model_type, parts, _LLAMA | dict(fixed), tensors, frozenset(ignored))


FAMILIES: tuple[Family, ...] = (
    Family(
        ("GPT2LMHeadModel",),
        {"classification": "GPT2ForSequenceClassification"},
        "gpt2",
        (
            one("n_layer", "depth", Depth),
            one("n_embd", "width", Size),
            one("n_head", "heads", Size),
            one("n_positions", "max_positions", Size),
            one("n_inner", "mlp_width", Size | None, None),
            activation("activation_function", "gelu_new"),
            one("layer_norm_epsilon", "norm_epsilon", Number, 1e-5),
            one("tie_word_embeddings", "tied", bool, True),
            only("scale_attn_weights", True),
            only("scale_attn_by_inverse_layer_idx", False),
            only("reorder_and_upcast_attn", False),
            only("n_special", 0),  # very old files have additional rows of the embedding
        ),
        _GPT_2,
        Tensors(
            {"token": "transformer.wte", "position": "transformer.wpe"},
            "transformer.h.{}.",
            {
                **{"attention_norm": "ln_1", "qkv": "attn.c_attn", "project": "attn.c_proj"},
                **{"mlp_norm": "ln_2", "expand": "mlp.c_fc", "contract": "mlp.c_proj"},
            },
            {"norm": "transformer.ln_f", "logits": "lm_head"},
            {"norm": "transformer.ln_f", "score": "score"},
            "transformer.",
            transposed=False,
        ),
        frozenset(
            {
                *("n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_type", "summary_use_proj", "summary_activation"),
                *("summary_proj_to_labels", "summary_first_dropout", "predict_special_tokens"),
            }
        ),
    ),
    _like_llama(
        "Llama",
        "llama",
        _head_size(None),
        _SILU,
        biases("attention_bias", "mlp_bias"),
        rope(),
        only("rope_interleaved", False),
        # pretraining_tp only changes rounding; transformers reads max_position_embeddings, not max_sequence_length.
        ignored=("pretraining_tp", "is_llama_config", "max_sequence_length"),
        kv_heads=None,
        positions=2048,
        older_names=("LLaMAForCausalLM",),  # of conversions from before transformers had the model
    ),
    _like_llama("Mistral", "mistral", _head_size(None), _SILU, window(4096), rope()),
    _like_llama("Qwen2", "qwen2", _head_size(None), _SILU, later_windows(), rope(), only("use_mrope", False), fixed={"bias": "qkv"}),
    _like_llama(
        "Qwen3",
        "qwen3",
        *(_head_size(128), _SILU, biases("attention_bias"), later_windows(), rope()),
        blocks=(*_LIKE_LLAMA, _QK_NORMS),
        fixed={"qk_norm": "head"},
    ),
    _like_llama(
        "Mixtral",
        "mixtral",
        *(_head_size(None), _SILU, window(None)),
        experts(("num_local_experts",), "intermediate_size", defaults=(8, 2, 0.001), renormalizes=True),
        only("router_jitter_noise", 0.0),
        rope(1_000_000.0),
        blocks=(
            _TWO_NORMS,
            _ATTENTION,
            {"experts/router": "block_sparse_moe.gate", "experts/gate": "block_sparse_moe.experts.*.w1"},
            {"experts/contract": "block_sparse_moe.experts.*.w2", "experts/expand": "block_sparse_moe.experts.*.w3"},
        ),
        epsilon=1e-5,
    ),
    _like_llama(
        "Olmoe",
        "olmoe",
        *(_SILU, biases("attention_bias"), only("clip_qkv", None), rope()),
        experts(("num_experts", "num_local_experts"), "intermediate_size", defaults=(64, 8, 0.01)),
        blocks=(_TWO_NORMS, _ATTENTION, _QK_NORMS, _EXPERTS),
        fixed={"qk_norm": "all"},
        epsilon=1e-5,
        kv_heads=None,
        judge=None,
    ),
    _like_llama(
        "Qwen2Moe",
        "qwen2_moe",
        *(_head_size(None), _SILU, flag("qkv_bias", True, "bias", "qkv", False), *_WITHOUT_WINDOWS, rope()),
        _experts_of_qwen((60, 4, 0.001), 1408, shared=True),
        blocks=(*_LIKE_LLAMA, _EXPERTS, _SHARED_EXPERT),
        ignored=("sliding_window", "max_window_layers"),  # without use_sliding_window they have no effect
    ),
    _like_llama(
        "Qwen3Moe",
        "qwen3_moe",
        *(_head_size(None), _SILU, biases("attention_bias"), *_WITHOUT_WINDOWS, rope()),
        _experts_of_qwen((128, 8, 0.001), 768),
        blocks=(*_LIKE_LLAMA, _QK_NORMS, _EXPERTS),
        fixed={"qk_norm": "head"},
        ignored=("sliding_window", "max_window_layers"),
    ),
    _like_llama(
        "Gemma2",
        "gemma2",
        *(_head_size(256), _GELU, biases("attention_bias"), attention_scale()),
        one("attn_logit_softcapping", "attention_soft_cap", Number | None, 50.0),
        one("final_logit_softcapping", "logits_soft_cap", Number | None, 30.0),
        only("use_bidirectional_attention", None, False),
        *(every_second_window(), rope()),
        blocks=(_FOUR_NORMS, _ATTENTION, _MLP),
        fixed=_GEMMA,
        ignored=("hidden_act", "sliding_window_size"),  # transformers reads hidden_activation and sliding_window
        tied=True,
    ),
    _like_llama(
        "Gemma3",
        "gemma3_text",
        *(_head_size(256), _GELU, biases("attention_bias"), attention_scale()),
        only("attn_logit_softcapping", None),
        one("final_logit_softcapping", "logits_soft_cap", Number | None, None),
        only("use_bidirectional_attention", False),
        *(windows_between(), rope_by_layer(1_000_000.0, 10_000.0)),
        blocks=(_FOUR_NORMS, _ATTENTION, _QK_NORMS, _MLP),
        fixed=_GEMMA | {"qk_norm": "head"},
        ignored=("hidden_act", "_sliding_window_pattern"),  # transformers reads hidden_activation, and layer_types
        tied=True,
        judge="Gemma3TextForSequenceClassification",
    ),
    _like_llama(
        "Phi3",
        "phi3",
        *(_SILU, window(None), rope(kinds=("longrope",), share=1.0, original=4096)),
        *(only(key, False) for key in ("attention_bias", "mlp_bias", "lm_head_bias")),
        *(only(key, 1) for key in ("full_attn_mod", "interpolate_factor")),
        blocks=(_TWO_NORMS, {"qkv": "self_attn.qkv_proj", "project": "self_attn.o_proj"}, _JOINED_MLP),
        ignored=("resid_pdrop", "embd_pdrop"),
        epsilon=1e-5,
        kv_heads=None,
    ),
    _like_llama(
        "SmolLM3",
        "smollm3",
        *(_SILU, biases("attention_bias", "mlp_bias"), layers_without_rope(), rope(2_000_000.0)),
        ignored=("max_window_layers", "pretraining_tp"),  # transformers reads layer_types and no_rope_layers
        tied=True,
    ),
    _like_llama(
        "GptOss",
        "gpt_oss",
        *(_head_size(64), biases("attention_bias", default=True)),
        experts(("num_local_experts",), "intermediate_size", defaults=(128, 4, 0.001), renormalizes=True, bias=True),
        *(every_second_window(128), rope(150_000.0, kinds=("yarn",), is_needed=True)),
        *(only(key, value) for key, value in {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}.items()),
        blocks=(
            _TWO_NORMS,
            _ATTENTION,
            {
                **{"sinks": "self_attn.sinks", "experts/router": "mlp.router"},
                "experts/gate/kernel,experts/expand/kernel": "mlp.experts.gate_up_proj:interleaved",
                "experts/gate/bias,experts/expand/bias": "mlp.experts.gate_up_proj_bias:interleaved",
                **{"experts/contract/kernel": "mlp.experts.down_proj", "experts/contract/bias": "mlp.experts.down_proj_bias"},
            },
        ),
        fixed={"activation": "clamped_swiglu", "sinks": True},
        ignored=("experts_per_token", "initial_context_length"),  # transformers reads num_experts_per_tok
        epsilon=1e-5,
    ),
    _like_llama(
        "Glm4",
        "glm4",
        *(_head_size(128), _SILU, flag("attention_bias", True, "bias", "qkv", False), rope(share=0.5)),
        blocks=(
            {"attention_norm": "input_layernorm", "attention_post_norm": "post_self_attn_layernorm"},
            {"mlp_norm": "post_attention_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
            *(_ATTENTION, _JOINED_MLP),
        ),
        fixed={"post_norms": True, "rope_pairs": "neighbours"},
        epsilon=1.5625e-7,
    ),
    _like_llama(
        "Glm4Moe",
        "glm4_moe",
        *(_head_size(None), _SILU, flag("attention_bias", False, "bias", "qkv", False)),
        flag("use_qk_norm", False, "qk_norm", "head", None),
        *(corrected_experts(128, 8, 1408, (1, 1), 1.0, dense=1), rope(share=0.5)),
        blocks=(*_LIKE_LLAMA, _QK_NORMS, _CORRECTED_EXPERTS),
        epsilon=1e-5,
        judge=None,
        has_further_blocks=True,
    ),
    _like_llama(
        "DeepseekV3",
        "deepseek_v3",
        *(_SILU, only("attention_bias", False), latents(), corrected_experts(256, 8, 2048, (8, 4), 2.5, dense=3)),
        rope(kinds=("yarn",), scales_attention=True),
        blocks=(_TWO_NORMS, _LATENTS, {"project": "self_attn.o_proj"}, _MLP, _CORRECTED_EXPERTS),
        ignored=("aux_loss_alpha", "ep_size", "head_dim", "pretraining_tp", "qk_head_dim", "seq_aux"),
        has_further_blocks=True,
    ),
    _like_llama(
        "Gemma4",
        "gemma4_text",
        *(_head_size(256), _GELU, biases("attention_bias")),
        one("final_logit_softcapping", "logits_soft_cap", Number | None, None),
        only("use_bidirectional_attention", None, "vision"),
        *(windows_between(512), full_attention()),
        rope_by_layer(1_000_000.0, 10_000.0, kinds=(*KINDS, "proportional"), is_needed=True),
        written("hidden_size_per_layer_input", 0, is_needed=True),
        *(written("num_kv_shared_layers", 0), written("enable_moe_block", False)),
        blocks=(_FOUR_NORMS, _ATTENTION, _QK_NORMS, _MLP, {"scale": "layer_scalar"}),
        fixed={"post_norms": True, "embed_scale": True, "qk_norm": "head_and_values", "attention_scale": 1.0, "layer_scale": True},
        # Without shared layers and experts, these keys have no effect.
        ignored=("vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts", "moe_intermediate_size"),
        tied=True,
        judge=None,
    ),
    _like_llama(
        "Qwen3_5",
        "qwen3_5_text",
        *(_head_size(256), _SILU, biases("attention_bias"), gated_delta(), only("attn_output_gate", True)),
        rope(share=0.25, reads_images=True),
        blocks=(*_LIKE_LLAMA, _QK_NORMS, _DELTA),
        fixed={"norm": "rms_plus_one", "qk_norm": "head", "attention_gate": True},
        ignored=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        judge="Qwen3_5TextForSequenceClassification",
    ),
    _like_llama(
        "Llama4",
        "llama4_text",
        *(_head_size(128), _SILU, biases("attention_bias"), input_weighing_experts(), chunks(), rope(500_000.0)),
        blocks=(
            _TWO_NORMS,
            _ATTENTION,
            {ours: theirs.replace("mlp", "feed_forward") for ours, theirs in {**_MLP, **_SHARED_EXPERT}.items()},
            {
                **{"experts/router": "feed_forward.router", "experts/contract/kernel": "feed_forward.experts.down_proj"},
                "experts/gate/kernel,experts/expand/kernel": "feed_forward.experts.gate_up_proj",
            },
        ),
        fixed={"rope_pairs": "neighbours"},
        ignored=("router_aux_loss_coef", "for_llm_compressor"),
        epsilon=1e-5,
        judge=None,
    ),
    Family(
        ("BertForPreTraining", "BertForMaskedLM"),  # BertForMaskedLM often also has the next-sentence head
        {"classification": "BertForSequenceClassification", "multiple_choice": "BertForMultipleChoice"},
        "bert",
        (
            *_sizes(),
            activation("hidden_act", "gelu"),
            one("layer_norm_eps", "norm_epsilon", Number, 1e-12),
            written("type_vocab_size", 2),
            only("position_embedding_type", "absolute"),
            written("tie_word_embeddings", True),
        ),
        _GPT_2 | {"kind": "bert", "tied": True},
        Tensors(
            {
                **{"token": "bert.embeddings.word_embeddings", "position": "bert.embeddings.position_embeddings"},
                **{"type": "bert.embeddings.token_type_embeddings", "norm": "bert.embeddings.LayerNorm"},
            },
            "bert.encoder.layer.{}.",
            {
                "qkv": "attention.self.query,attention.self.key,attention.self.value",
                "project": "attention.output.dense",
                "attention_norm": "attention.output.LayerNorm",
                "expand": "intermediate.dense",
                "contract": "output.dense",
                "mlp_norm": "output.LayerNorm",
            },
            {
                "pooler": "bert.pooler.dense",
                "next_sentence": "cls.seq_relationship",
                "transform": "cls.predictions.transform.dense",
                "norm": "cls.predictions.transform.LayerNorm",
                "logits/bias": "cls.predictions.bias",
            },
            {"pooler": "bert.pooler.dense", "score": "classifier"},
            "bert.",
            copies={
                "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            },
            optional={"BertForMaskedLM": ("bert.pooler.", "cls.seq_relationship.")},  # transformers leaves them out
        ),
        frozenset(
            {
                *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "directionality"),
                *("language", "name"),  # of FARM
                *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
            }
        ),
    ),
)
"""The table. An export uses the first row that can express the model, unless the run started from a folder of another family."""

WITH_IMAGES: Mapping[str, str] = {
    **{"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM", "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM"},
    **{"Llama4ForConditionalGeneration": "Llama4ForCausalLM", "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM"},
}
"""Architectures that also read images, with the architecture of their language model. Of their folders only this model is read."""

ARCHITECTURES: Mapping[str, Family] = {name: family for family in FAMILIES for name in (*family.architectures, *family.judges.values())}
