"""`config.json` of a Hugging Face folder: the model that it describes, unsupported keys, and the one that an export writes."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jpipe import InputError
from jpipe_lm.checkpoint.huggingface.names import layout
from jpipe_lm.config.huggingface import families, read_config, write_config
from jpipe_lm.config.model.presets import PRESETS
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train.checkpoint.weights import by_path
from jpipe_train.config import config_file
from jpipe_train.config.config import model_class
from tests.lm.checkpoint.families import LLAMA3 as LLAMA3_8
from tests.lm.checkpoint.families import LONG, MODELS, PUBLISHED, WINDOWS, base
from tests.lm.checkpoint.folders import GOLDEN, copied

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALED = {"rope_type": "llama3", **LLAMA3}
OURS = {"kind": "llama3", "factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_positions": 8192}
YARN = {
    **{"kind": "yarn", "factor": 4.0, "original_positions": 8, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": True},
    "attention_factor": None,
}


def content_of(name: str, /, **changes) -> dict:
    """Return a golden `config.json` with other values; `...` removes a key."""
    content = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    return {key: value for key, value in content.items() if value is not ...}


def keys(name: str, /, **changes) -> dict:
    return read_config.parse(content_of(name, **changes)).keys


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gpt2", {"n_inner": None}, {"mlp_width": 64, "kind": "decoder", "positions": "learned", "tied": True, "norm_epsilon": 1e-5}),
        ("gpt2", {"activation_function": "gelu"}, {"activation": "gelu_exact"}),
        ("gpt2", {"activation_function": ...}, {"activation": "gelu"}),
        ("gpt2", {"tie_word_embeddings": False}, {"tied": False}),
        ("llama", {"head_dim": ..., "num_key_value_heads": ...}, {"head_size": 4, "kv_heads": 4}),
        ("llama", {"rope_parameters": ...}, {"rope_base": 10000.0, "rope_scaling": None}),
        ("llama", {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": SCALED}, {"rope_base": 5e5, "rope_scaling": OURS}),
        ("llama", {"rope_parameters": ..., "rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}}, {"rope_scaling": OURS}),
        ("llama", {"rope_parameters": {"rope_theta": 2e4}}, {"rope_base": 2e4, "rope_scaling": None}),
        ("llama", {"rope_parameters": {"rope_type": "default", "type": "default", "rope_theta": 2e4}}, {"rope_scaling": None}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, {"rope_base": 2e4, "rope_scaling": None}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {"bias": True, "tied": True, "gated_mlp": True}),
        ("bert", {"hidden_act": "gelu_new"}, {"activation": "gelu", "kind": "bert", "tied": True, "norm_epsilon": 1e-12}),
        ("bert", {"architectures": ["BertForMaskedLM"]}, {"kind": "bert"}),
    ],
)  # fmt: skip
def test_it_says_the_keys_of_the_model(name, changes, expected):
    model_keys = keys(name, **changes)
    assert {key: model_keys[key] for key in expected} == expected
    ModelConfig(**model_keys, seq_len=8)


SUPPORTED = f"expected one of {', '.join(family.architectures[0] for family in families.FAMILIES)}, or a model of the same family, found "


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"architectures": ["FalconForCausalLM"]}, f"config.json: architectures: {SUPPORTED}'FalconForCausalLM'"),
        ("gpt2", {"architectures": []}, "config.json: architectures: "),
        ("gpt2", {"architectures": None}, "config.json: architectures: "),
        ("gpt2", {"architectures": ...}, "config.json: key 'architectures' is missing; add it"),
        ("gpt2", {"activation_function": "relu"}, "config.json: activation_function: expected 'gelu_new', 'gelu_pytorch_tanh', "),
        ("gpt2", {"n_head": 3}, "config.json: expected n_head to divide n_embd 16, found 3"),
        ("gpt2", {"n_layer": ...}, "config.json: key 'n_layer' is missing; add it"),
        ("gpt2", {"n_layer": "2"}, "config.json: n_layer: "),
        ("gpt2", {"n_layer": 10**8}, "config.json: n_layer: expected less than or equal to 1000, found 100000000; "),
        ("gpt2", {"n_layer": 10**10}, "config.json: n_layer: expected less than or equal to 1000, found 10000000000; "),
        ("gpt2", {"n_positions": 10**9}, "config.json: n_embd 16 × n_positions 1000000000 makes a table of positions of more than"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "config.json: scale_attn_by_inverse_layer_idx: expected false, found true"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "config.json: quantization_config: "),
        ("llama", {"rope_parameters": {"rope_type": "ntk"}}, "rope_parameters.rope_type: expected 'default', 'llama3', "),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type: dynamic scales positions by "),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}}, "rope_parameters.low_freq_factor: "),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factr": 2.0}}, "unknown key 'rope_parameters.factr'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, "expected one rope_type, found a"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, found 0.5"),
        ("llama", {"sliding_window": 4096}, "unknown key 'sliding_window'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "expected factor with rope_type llama3, found none; add factor"),
        ("llama", {"rope_parameters": ..., "rope_scaling": {"factor": 8.0}}, "rope_scaling: expected rope_type with factor, found none"),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, "rope_parameters: expected rope_type with factor, found none; add"),
        ("llama", {"rope_parameters": {"long_factor": [1.0], "rope_theta": 5e5}}, "expected rope_type with long_factor, found none"),
        ("llama", {"rope_theta": 5.0}, "expected one rope_theta, found a different one in rope_parameters"),
        ("llama", {"rope_scaling": SCALED}, "expected equal values in rope_scaling and rope_parameters"),
        ("llama", {"mlp_bias": True}, "expected attention_bias where mlp_bias is true, found false"),
        ("llama", {"hidden_act": "relu2"}, "config.json: hidden_act: "),
        ("llama", {"num_key_value_heads": 3}, "config.json: num_attention_heads 4 is not divisible by num_key_value_heads 3; "),
        ("bert", {"type_vocab_size": 3}, "config.json: type_vocab_size: expected 2, found 3"),
        ("bert", {"position_embedding_type": "relative_key"}, "config.json: position_embedding_type: expected 'absolute'"),
        ("bert", {"tie_word_embeddings": False}, "config.json: tie_word_embeddings: "),
        ("bert", {"is_decoder": True}, "config.json: is_decoder: expected false, found true"),
    ],
)  # fmt: skip
def test_a_model_that_jpipe_does_not_have_is_refused(name, changes, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        keys(name, **changes)
    line = str(caught.value)
    assert line.endswith(("; add it", "use another model", "does not support models of this size; use a smaller model"))
    assert ("smaller" in line) == ("less than" in line or "more than" in line)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "expected JSON, found: "),
        (b"[]", "config.json: expected a JSON object, found a list; give a folder such as transformers' save_pretrained writes"),
        (b"\xff", "expected JSON in UTF-8, found other bytes"),
        (b'{"a": NaN}', "expected JSON, found: NaN is not a JSON number"),
        (b"[" * 10**5, "found too many nested lists"),
        (b" " * (2**20 + 1), "cannot read the file: it is larger than 1 MiB, the limit for such a file"),
    ],
    ids=["cut off", "a list", "not UTF-8", "NaN", "deep", "huge"],
)
def test_a_file_that_is_not_a_config_is_refused(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)):
        read_config.read(tmp_path)


def loaded(tmp_path: Path, model: str, *more: str, name: str = "llama"):
    (tmp_path / "config.yaml").write_text(f"warm_start: {{file: {GOLDEN / name}}}\ndata: {{format: tokens, path: here}}\nmodel: {model}\n")
    return config_file.load(tmp_path / "config.yaml", more)


def test_the_keys_of_the_model_are_filled_in_and_others_stay(tmp_path):
    model = loaded(tmp_path, "{seq_len: 8, dropout: 0.5, compute_dtype: bfloat16, init: normal, width: 16}").model
    assert (model.width, model.kv_heads, model.positions, model.rope_scaling.factor) == (16, 2, "rope", 4.0)
    assert (model.seq_len, model.dropout, model.compute_dtype, model.init) == (8, 0.5, "bfloat16", "normal")
    assert loaded(tmp_path, "{seq_len: 8, width: null}").model.width == 16
    partial = loaded(tmp_path, "{seq_len: 8, depth: 5}", "warm_start.mode=partial").model
    assert (partial.depth, partial.width) == (5, 16)
    experts = loaded(tmp_path, "{seq_len: 8, experts: {count: 4, per_token: 2, mlp_width: 8}}", "warm_start.mode=partial").model
    assert (experts.mlp_width, experts.experts.mlp_width) == (None, 8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{seq_len: 8, width: 32, depth: 3}", "/llama/config.json, found 3; remove model.depth\n"),
        ("{seq_len: 8, rope_scaling: null}", "model.rope_scaling: expected {\"kind\": \"llama3\", \"factor\": 4.0,"),
        ("{seq_len: 8, preset: llama-tiny}", "model.preset has no effect, because "),
        ("{seq_len: 8, target: 'a:b'}", "model.target: expected the built-in model that "),
        ("{seq_len: 33}", "model: seq_len 33 is more than max_positions 32; change one of them"),
        ("null", "model: seq_len 128 is more than max_positions 32"),
        ("{seq_len: 8, widht: 3}", "unknown key 'model.widht'; did you mean 'model.width'?"),
    ],
)  # fmt: skip
def test_keys_that_contradict_the_folder_are_refused(model, message, tmp_path):
    with pytest.raises(InputError, match=re.escape(message)):
        loaded(tmp_path, model)


def test_bytes_need_a_vocabulary_of_all_bytes(tmp_path):
    with pytest.raises(InputError, match=re.escape("model.vocab_size 64 is less than the 256 bytes of a text; raise or remove it")):
        loaded(tmp_path, "{seq_len: 8}", "data={}")


def test_a_folder_may_be_relative_and_linked(tmp_path, monkeypatch):
    copied("gpt2", tmp_path / "folder")
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.chdir(tmp_path)
    assert loaded(tmp_path, "{seq_len: 8}", "warm_start.file=link").model.depth == 2


# Families -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_config_of_each_family_becomes_keys_and_the_same_config_again(name):
    architecture, content = MODELS[name]
    described = read_config.parse({"architectures": [architecture], **content})
    config = ModelConfig(**described.keys, seq_len=8)
    written = json.loads(json.dumps(write_config.to_json_keys(config, architecture)))
    assert read_config.parse(written) == described
    assert written["architectures"] == [architecture]
    assert written.get("router_aux_loss_coef") != 0  # the folder's factor is not known to be 0
    same = {key: value for key, value in content.items() if key in written and key not in ("rope_parameters", "max_window_layers")}
    assert {key: written[key] for key in same} == same
    for key, value in written.items():  # each is one that is read, and what is known of it is checked
        if key not in ("architectures", "model_type") and not isinstance(value, str | bool | None):
            with pytest.raises(InputError, match=re.escape(key)):
                read_config.parse({**written, key: "nonsense"})


@pytest.mark.thinned(most=8)
@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_tensors_fit_the_parameters_of_the_layers(name):
    architecture, content = MODELS[name]
    described = read_config.parse({"architectures": [architecture], **content})
    stack = layers(ModelConfig(**described.keys, seq_len=8))
    specs = stack.specs(jax.ShapeDtypeStruct((1, 8), "int32"))
    shapes = {f"{i}/{path}": leaf.shape for i, spec in specs.items() for path, leaf in by_path(spec.params).items()}
    if described.keys["tied"]:
        assert shapes.pop("head/token/embedding") == shapes["embed/token/embedding"]
    assert {ours: shape for row in layout(described) for ours, shape in row.shapes.items()} == shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset_of_the_model(name):
    architecture, content = PUBLISHED[name]
    keys = read_config.parse({"architectures": [architecture], **content}).keys
    expected = write_config.to_json_keys(ModelConfig(preset=name))
    assert write_config.to_json_keys(ModelConfig(**keys, seq_len=8)) == expected
    assert expected["architectures"] == [architecture]


OLD = {  # what files of these models have beside the sizes
    "gpt2-medium": ("gpt2", {"n_special": 0, "predict_special_tokens": True, "n_ctx": 1024, "summary_type": "cls_index"}),
    "gpt2-xl": ("gpt2", {"output_past": True, "n_ctx": 1024}),
    "distilgpt2": ("gpt2", {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}),
    "ruGPT-3": ("gpt2", {"xla_device": None, "output_past": True, "gradient_checkpointing": False, "num_labels": 2}),
    "transformers 2": ("gpt2", {"pruned_heads": {}, "eos_token_ids": 0, "use_bfloat16": False, "torchscript": False, "do_sample": False}),
    "LLaMA 1": ("llama", {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048, "pad_token_id": -1}),
    "Vicuna": ("llama", {"max_sequence_length": 2048, "pretraining_tp": 1, "_name_or_path": "vicuna-7b"}),
    "FARM": ("bert", {"language": "german", "name": "Bert", "xla_device": None, "output_past": True, "pruned_heads": {}}),
}


@pytest.mark.parametrize("name", OLD)
def test_keys_of_older_files_that_change_nothing_are_passed_over(name):
    family, further = OLD[name]
    assert keys(family, **further) == keys(family)
    assert keys("llama", max_position_embeddings=...)["max_positions"] == 2048  # as LlamaConfig of transformers
    with pytest.raises(InputError, match="n_special: expected 0, found 2"):
        keys("gpt2", n_special=2)


def test_every_key_that_transformers_gives_a_configuration_is_known_of_each_family():
    """The keys of PretrainedConfig of transformers 1 to 4, with the values that change nothing."""
    written = json.loads(OLD_DEFAULTS)
    for architecture, content in MODELS.values():
        read_config.parse({**written, "architectures": [architecture], **content})


OLD_DEFAULTS = """{
  "output_attentions": false, "output_hidden_states": false, "output_hiddend_states": false, "output_past": true, "use_cache": true,
  "torchscript": false, "torch_dtype": null, "use_bfloat16": false, "tf_legacy_loss": false, "pruned_heads": {}, "return_dict": true,
  "chunk_size_feed_forward": 0, "is_encoder_decoder": false, "is_decoder": false, "cross_attention_hidden_size": null,
  "add_cross_attention": false, "tie_encoder_decoder": false, "max_length": 20, "min_length": 0, "do_sample": false,
  "early_stopping": false, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
  "typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
  "bad_words_ids": null, "num_return_sequences": 1, "output_scores": false, "return_dict_in_generate": false,
  "forced_bos_token_id": null, "forced_eos_token_id": null, "remove_invalid_values": false, "exponential_decay_length_penalty": null,
  "suppress_tokens": null, "begin_suppress_tokens": null, "finetuning_task": null, "id2label": {"0": "LABEL_0"}, "num_labels": 1,
  "_num_labels": 1, "label2id": {"LABEL_0": 0}, "tokenizer_class": null, "prefix": null, "bos_token_id": 0, "pad_token_id": 0,
  "eos_token_id": 0, "eos_token_ids": 0, "sep_token_id": null, "decoder_start_token_id": null, "task_specific_params": null,
  "problem_type": null, "xla_device": null, "_name_or_path": "", "_commit_hash": null, "_attn_implementation_autoset": false,
  "_flash_attn_2_enabled": true, "transformers_version": "4.4.0", "gradient_checkpointing": false
}"""


OF_FAMILIES = {
    "mistral": ({"sliding_window": ...}, {"window": 4096, "window_layers": None, "head_size": 6}),
    "qwen2": ({"use_sliding_window": False}, {"window": None, "window_layers": None, "bias": "qkv", "rope_scaling": {**YARN}}),
    "qwen3": ({**WINDOWS, "max_window_layers": 2}, {"window": 4, "window_layers": [False, False, True], "qk_norm": "head", "bias": False}),
    "gemma2": (
        {"layer_types": ..., "use_bidirectional_attention": False, "query_pre_attn_scalar": 8, "hidden_act": "relu"},
        {"window_layers": [True, False], "attention_scale": None, "attention_soft_cap": 2.0, "logits_soft_cap": 3.0, "embed_scale": True},
    ),
    "gemma3": (
        {"layer_types": ..., "sliding_window_pattern": 2, "rope_parameters": ..., "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"window_layers": [True, False], "rope_base": 1e6, "window_rope_base": 1e4, "rope_scaling": {"kind": "linear", "factor": 2.0}},
    ),
    "phi3": (
        {"rope_parameters": ..., "partial_rotary_factor": 0.75, "rope_scaling": {**LONG, "rope_type": ..., "type": "su", "factor": 4.0}},
        {"rope_share": 0.75, "window": 5},
    ),
    "smollm3": ({"no_rope_layers": ..., "use_sliding_window": False}, {"rope_layers": None, "window": None}),
}


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_the_keys_of_families_decide_keys_of_the_model(name):
    changes, expected = OF_FAMILIES[name]
    content = {key: value for key, value in {**MODELS[name][1], **changes}.items() if value is not ...}
    if name == "phi3":
        content["rope_scaling"].pop("rope_type")
    keys = read_config.parse({"architectures": [MODELS[name][0]], **content}).keys
    assert {key: keys[key] for key in expected} == expected
    if name == "phi3":
        assert keys["rope_scaling"]["attention_factor"] == pytest.approx((1 + np.log(4) / np.log(8)) ** 0.5)


def test_of_a_model_that_reads_images_the_language_model_is_read():
    architecture, content = MODELS["qwen3.5"]
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": content, "vision_config": {}, "tie_word_embeddings": True}
    expected = read_config.parse({"architectures": [architecture], **content, "tie_word_embeddings": True})
    assert read_config.parse(whole) == expected
    names = layout(expected)
    assert names.known_as("model.language_model.norm.weight") == names.known_as("language_model.model.norm.weight") == "model.norm.weight"
    assert {names.known_as(name) for name in ("model.visual.blocks.0.norm.weight", "vision_tower.patches.weight", "mtp.norm.weight")} == {
        None
    }
    with pytest.raises(
        InputError, match="text_config: expected the keys of the language model of Gemma4ForConditionalGeneration, found None"
    ):
        read_config.parse({"architectures": ["Gemma4ForConditionalGeneration"]})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"pruned_heads": {"0": [1]}}, "pruned_heads: expected at most 0 items, found "),
        ("mistral", {"max_sequence_length": 8}, "unknown key 'max_sequence_length'"),
        ("mistral", {"num_key_value_heads": ...}, "key 'num_key_value_heads' is missing; add it"),
        ("mistral", {"attention_sinks": 4}, "unknown key 'attention_sinks'; jpipe does not know whether this key changes the model; if"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "layer_types: sliding_attention needs a window"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types: expected one type for each of the 3 layers, found 1"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types.0: expected 'full_attention' or 'sliding_attention', found"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected null or false, found true"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected null, found 50.0"),
        ("olmoe", {"num_local_experts": 16}, "expected one num_experts, found a different one in num_local_experts; remove one of them"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": LLAMA3_8}},
            "rope_parameters.sliding_attention.rope_type: expected 'default', found",
        ),
        ("phi3", {"rope_parameters": {**LLAMA3_8}}, "rope_parameters.rope_type: expected 'default', 'longrope', found 'llama3'"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias: expected false, found true"),
        ("phi3", {"original_max_position_embeddings": 16}, "original_max_position_embeddings: expected 8 as in rope_parameters, found 16"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit: expected 7.0, found 5.0"),
        ("gpt-oss", {"rope_parameters": ...}, "expected rope_parameters or rope_scaling, found none"),
        ("glm4-moe", {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', found 'softmax'"),
        ("deepseek", {"num_key_value_heads": 2}, "latent needs rope positions, no kv_heads, no rope_share, and no biases or"),
        ("deepseek", {"attention_bias": True}, "attention_bias: expected false, found true"),
        ("gemma4", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: expected 0, found 8"),
        ("gemma4", {"hidden_size_per_layer_input": ...}, "key 'hidden_size_per_layer_input' is missing; add it"),
        ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers: expected 0, found 1"),
        (
            "gemma4",
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            "layer_types: expected sliding_attention and full_attention,",
        ),
        (
            "gemma4",
            {"per_layer_config": {"1": {"head_dim": 4}}},
            "per_layer_config: expected the same keys for each layer without a window",
        ),
        ("gemma4", {"rope_parameters": ...}, "expected rope_parameters.full_attention, found none"),
        ("qwen3.5", {"layer_types": ["linear_attention"]}, "layer_types: expected one type for each of the 3 layers, found 1"),
        ("qwen3", base(100.0, None, mrope_section=[1, 1, 2]), "mrope_section: expected null, found a value"),
        ("llama4", {"attention_chunk_size": None}, "layer_types: chunked_attention needs attention_chunk_size, found none"),
        ("llama4", {"layer_types": ["full_attention"]}, "layer_types: expected one type for each of the 3 layers, found 1"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected one number for each of the 3 layers, found 1"),
        ("smollm3", {"no_rope_layers": [1, 2, 3]}, "no_rope_layers.1: expected 0 or 1, found 2"),
    ],
)
def test_what_a_family_does_not_have_is_refused(name, changes, message):
    content = {key: value for key, value in {**MODELS[name][1], **changes}.items() if value is not ...}
    with pytest.raises(InputError, match=re.escape(f"config.json: {message}")):
        read_config.parse({"architectures": [MODELS[name][0]], **content})


# Written ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PRESETS, "default"])
def test_a_written_config_describes_the_same_model(name):
    model = ModelConfig() if name == "default" else ModelConfig(preset=name)
    content = json.loads(json.dumps(write_config.to_json_keys(model)))
    parsed = read_config.parse(content)
    for key, value in parsed.keys.items():
        ours = getattr(model, f"{key}_used", getattr(model, key))
        ours = ours.model_dump() if key in ("rope_scaling", "experts") and ours else ours
        assert (ours | {"z_loss": 0.0} if key == "experts" and ours else ours) == value, key
    assert content["model_type"] == families.ARCHITECTURES[parsed.architecture].model_type


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"positions": "rope"}, "most similar: GPT2LMHeadModel has model.positions \"learned\", not \"rope\"; "),
        ({"bias": False}, "GPT2LMHeadModel has model.bias true, not false"),
        ({"kv_heads": 2}, "GPT2LMHeadModel has model.kv_heads 4, not 2"),
        ({"head_size": 64}, "GPT2LMHeadModel has model.head_size 32, not 64"),
        (
            {**PRESETS["llama-tiny"], "heads": 3, "kv_heads": 1, "head_size": 6},
            "LlamaForCausalLM has model.heads that divide model.width 16, not 3",
        ),
        ({"target": "a:b"}, "expected a built-in model, found one of 'a:b'; remove --layout"),
    ],
)  # fmt: skip
def test_a_combination_that_no_architecture_has_is_refused(model, message):
    with pytest.raises(InputError, match=re.escape(message)):
        write_config.to_json_keys(model_class(model)(**model))
