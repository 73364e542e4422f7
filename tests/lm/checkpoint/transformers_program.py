"""What `test_transformers.py` runs where transformers is: models in other shapes than the golden ones, and folders of jpipe's loaded.

    .venv-torch/bin/python -m tests.lm.checkpoint.transformers_program write FOLDER
    .venv-torch/bin/python -m tests.lm.checkpoint.transformers_program families FOLDER
    .venv-torch/bin/python -m tests.lm.checkpoint.transformers_program images FOLDER
    .venv-torch/bin/python -m tests.lm.checkpoint.transformers_program load FOLDER ...

`load` puts a results.safetensors into each folder, of the same content as a golden.safetensors.
"""

import copy
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.lm.checkpoint.families import MODELS
from tests.lm.checkpoint.golden.write_golden import (
    BERT,
    GPT2,
    LLAMA,
    SYMBOLS,
    computed,
    decoder_batch,
    encoder_batch,
    results,
    spread,
    write,
)

ROUNDED = ("glm4", "gemma4", "qwen3.5")  # with some other seeds even the logits of transformers are 1e-5 and more away from float64


def changed(config: transformers.PreTrainedConfig, **keys: object) -> transformers.PreTrainedConfig:
    """Return a copy of a config with changed values of some keys."""
    new_config = copy.deepcopy(config)
    for key, value in keys.items():
        setattr(new_config, key, value)
    return new_config


def write_all(folder: Path) -> None:
    """Write folders of each architecture: tied and untied, in shards, with grouped queries, with and without a scaling, in bfloat16."""
    untied = changed(GPT2, tie_word_embeddings=False, activation_function="gelu", layer_norm_epsilon=1e-3, n_inner=None)
    write(folder / "gpt2", spread(transformers.GPT2LMHeadModel(untied), 1), decoder_batch(2), max_shard_size="6KB")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    tied = changed(LLAMA, tie_word_embeddings=True, num_key_value_heads=1, rope_parameters=rope, attention_bias=True, mlp_bias=True)
    write(folder / "llama-tied", spread(transformers.LlamaForCausalLM(tied), 3), decoder_batch(4))
    write(folder / "bert", spread(transformers.BertForPreTraining(changed(BERT, hidden_act="gelu_new")), 7), encoder_batch(8))
    masked = spread(transformers.BertForMaskedLM(BERT), 9)
    masked.save_pretrained(folder / "masked")
    tokens = decoder_batch(10)["tokens"]
    with torch.no_grad():
        save_file({"tokens": tokens.to(torch.int32), "logits": masked(tokens).logits}, folder / "masked" / "golden.safetensors")
    short = spread(transformers.GPT2LMHeadModel(GPT2), 11).to(torch.bfloat16)
    short.save_pretrained(folder / "bfloat16")
    logits, loss = computed(short.float(), decoder_batch(12))
    save_file({**decoder_batch(12), **logits, "loss": loss.detach()}, folder / "bfloat16" / "golden.safetensors")


def write_families(folder: Path) -> None:
    """Write a folder of each of `MODELS`."""
    for number, (name, (architecture, keys)) in enumerate(MODELS.items()):
        seed = 0 if name in ROUNDED else number
        kind = getattr(transformers, architecture)
        model = spread(kind(kind.config_class(**copy.deepcopy(keys))), seed)
        batch = decoder_batch(20 + seed)
        following = {} if "Bert" in architecture else {"greedy": model.generate(batch["tokens"][:, :5], max_new_tokens=7, do_sample=False)}
        write(folder / name, model, batch | following)


def write_with_images(folder: Path) -> None:
    """Write folders of models that also read images, each with logits of texts."""
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 16, "patch_size": 2}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    for name, kind in {"qwen3.5": "Qwen3_5", "gemma3": "Gemma3", "gemma4": "Gemma4"}.items():
        known = getattr(transformers, f"{kind}VisionConfig", None) or transformers.SiglipVisionConfig
        of_images = {key: value for key, value in vision.items() if hasattr(known(), key)}
        config = getattr(transformers, f"{kind}Config")(
            text_config={**copy.deepcopy(MODELS[name][1]), "pad_token_id": 0}, vision_config=of_images
        )
        model = spread(getattr(transformers, f"{kind}ForConditionalGeneration")(config), 0)
        model.save_pretrained(folder / name)
        tokens = decoder_batch(20)["tokens"]
        with torch.no_grad():
            save_file({"tokens": tokens.to(torch.int32), "logits": model(tokens).logits.contiguous()}, folder / name / "golden.safetensors")


def load(folder: Path) -> None:
    """Load the model of a folder, check that no weights are missing or unexpected, and save its results."""
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model, loading_info = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    batch = {key: value.long() for key, value in load_file(folder / "batch.safetensors").items()}
    save_file(results(model.eval(), batch), folder / "results.safetensors")
    if (folder / "tokenizer.json").exists():
        words = transformers.AutoTokenizer.from_pretrained(folder)
        print([int(number) % SYMBOLS for number in words("the quick fox")["input_ids"]], words.decode(words("the quick fox")["input_ids"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "write":
        write_all(Path(sys.argv[2]))
    elif sys.argv[1] == "families":
        write_families(Path(sys.argv[2]))
    elif sys.argv[1] == "images":
        write_with_images(Path(sys.argv[2]))
    else:
        for name in sys.argv[2:]:
            load(Path(name))
