"""What `test_transformers_heads.py` runs where transformers is: models that judge whole texts, and folders of jpipe's loaded.

    .venv-torch/bin/python -m tests.lm.checkpoint.heads_program write FOLDER
    .venv-torch/bin/python -m tests.lm.checkpoint.heads_program load FOLDER ...

Each folder gets a golden.safetensors, or with `load` a results.safetensors, with a batch, its logits and loss, and as after/NAME the
weights after a step of SGD.
"""

import copy
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.lm.checkpoint.families import LENGTH, MODELS, SYMBOLS
from tests.lm.checkpoint.golden.write_golden import BERT, GPT2, RATE, named, spread

ROWS, CHOICES = 4, 2
FAMILIES = ("llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3-short", "smollm3", "mixtral", "qwen2-moe", "qwen3-moe")
FAMILIES += ("gpt-oss", "glm4", "deepseek", "qwen3.5")


def configs() -> dict[str, tuple[str, transformers.PreTrainedConfig]]:
    """Return architectures and configs by name; padding is token 0."""
    found = {
        "bert": ("BertForSequenceClassification", copy.deepcopy(BERT)),
        "bert-regression": ("BertForSequenceClassification", copy.deepcopy(BERT)),
        "bert-choice": ("BertForMultipleChoice", copy.deepcopy(BERT)),
        "gpt2": ("GPT2ForSequenceClassification", copy.deepcopy(GPT2)),
    }
    for name in FAMILIES:
        architecture, keys = MODELS[name]
        architecture = (
            architecture.replace("Gemma3For", "Gemma3TextFor")
            .replace("Qwen3_5For", "Qwen3_5TextFor")
            .replace("ForCausalLM", "ForSequenceClassification")
        )
        found[name] = architecture, getattr(transformers, architecture).config_class(**copy.deepcopy(keys))
    for name, (_, config) in found.items():
        config.num_labels = 1 if name == "bert-regression" else 3
        if config.num_labels == 3 and name == "bert":
            config.id2label = {0: "no", 1: "maybe", 2: "yes"}
            config.label2id = {"no": 0, "maybe": 1, "yes": 2}
        config.pad_token_id = 0
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False  # these models of transformers have no router loss
    return found


def batch_of(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Return rows of different lengths, with labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, CHOICES, LENGTH) if name == "bert-choice" else (ROWS, LENGTH)
    lengths = torch.tensor([12, 5, 9, 1, 3, 11, 12, 7])[: ROWS * (CHOICES if name == "bert-choice" else 1)].reshape(shape[:-1])
    mask = torch.arange(LENGTH) < lengths[..., None]
    tokens = torch.randint(1, SYMBOLS, shape, generator=generator) * mask
    batch = {"tokens": tokens, "mask": mask.long()}
    if name.startswith("bert"):
        batch["types"] = ((torch.arange(LENGTH) >= 4) & mask).long()
    if name == "bert-regression":
        return {**batch, "labels": torch.randn(ROWS, generator=generator)}
    return {**batch, "labels": torch.randint(0, CHOICES if name == "bert-choice" else 3, (ROWS,), generator=generator)}


def results(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take a step of SGD and return the batch, the logits and loss before the step, and the weights after it."""
    types = {"token_type_ids": batch["types"]} if "types" in batch else {}
    outputs = model(input_ids=batch["tokens"], attention_mask=batch["mask"], labels=batch["labels"], **types)
    outputs.loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    after = {f"after/{key}": parameter.detach() for key, parameter in named(model).items()}
    return {
        **{key: value if value.is_floating_point() else value.to(torch.int32) for key, value in batch.items()},
        **{"logits": outputs.logits.detach().squeeze(-1), "loss": outputs.loss.detach(), **after},
    }


def write_all(folder: Path) -> None:
    """Write a folder of each model."""
    for seed, (name, (architecture, config)) in enumerate(configs().items()):
        model = spread(getattr(transformers, architecture)(config), seed)
        model.save_pretrained(folder / name)
        save_file(results(model, batch_of(name, 50 + seed)), folder / name / "golden.safetensors")


def load(folder: Path) -> None:
    """Load the model of a folder, check that no weights are missing or unexpected, and save its results."""
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model, loading_info = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    batch = {key: value if value.is_floating_point() else value.long() for key, value in load_file(folder / "batch.safetensors").items()}
    save_file(results(model.eval(), batch), folder / "results.safetensors")
    print(architecture, model.config.id2label)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "write":
        write_all(Path(sys.argv[2]))
    else:
        for each in sys.argv[2:]:
            load(Path(each))
