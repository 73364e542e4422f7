"""Writes the folders beside it: models of transformers with random weights, what they compute, and the weights after a step of SGD.

    .venv-torch/bin/python tests/lm/checkpoint/golden/write_golden.py

Each gets a `golden.safetensors` with a batch, the logits, the loss, and after/NAME: the weights after the step.
"""

import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
ROWS, LENGTH, SYMBOLS, RATE = 4, 12, 64, 0.1
CENTERED = ("Gemma2", "Gemma3", "Qwen3_5")  # models in which the scales of norms are 1 plus a parameter
NEVER = -100  # a label that is not counted

GPT2 = GPT2Config(
    vocab_size=SYMBOLS, n_positions=16, n_embd=16, n_layer=2, n_head=2, n_inner=24, bos_token_id=1, eos_token_id=2, use_cache=False
)
LLAMA = LlamaConfig(
    vocab_size=SYMBOLS,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    use_cache=False,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)
BERT = BertConfig(
    vocab_size=SYMBOLS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16
)


def spread(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Set weights that are far from their initial values, so that all of them matter, and turn off dropout."""
    generator = torch.Generator().manual_seed(seed)
    stored = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    with torch.no_grad():
        for name, parameter in [*sorted(model.named_parameters()), *sorted(stored.items())]:
            scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            is_centered = type(model).__name__.startswith(CENTERED) and "linear_attn" not in name
            start = 1.0 if parameter.ndim == 1 and name.endswith(("weight", "scalar")) and not is_centered else 0.0  # those of norms
            parameter.copy_(start + scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def decoder_batch(seed: int) -> dict[str, torch.Tensor]:
    """Return tokens and labels, some of which are not counted."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, SYMBOLS, (2, ROWS, LENGTH), generator=generator)
    labels[torch.rand((ROWS, LENGTH), generator=generator) < 0.2] = NEVER
    return {"tokens": tokens, "labels": labels}


def encoder_batch(seed: int) -> dict[str, torch.Tensor]:
    """Return tokens of two sentences with padding at the end, and labels for three positions of each row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, SYMBOLS, (ROWS, LENGTH), generator=generator)  # 0 is padding
    mask = torch.arange(LENGTH)[None] < torch.tensor([12, 9, 10, 7])[:, None]
    types = (torch.arange(LENGTH)[None] >= 4) & mask
    labels = torch.full((ROWS, LENGTH), NEVER)
    labels[:, [1, 3, 5]] = torch.randint(0, SYMBOLS, (ROWS, 3), generator=generator)
    return {"tokens": tokens * mask, "types": types.long(), "mask": mask.long(), "labels": labels, "next": torch.tensor([0, 1, 1, 0])}


def computed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the logits and the loss."""
    if "mask" not in batch:
        outputs = model(input_ids=batch["tokens"])
        loss = cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=NEVER)
        of_routers = getattr(outputs, "aux_loss", None)
        return {"logits": outputs.logits}, loss if of_routers is None else loss + model.router_aux_loss_coef * of_routers
    outputs = model(
        input_ids=batch["tokens"],
        token_type_ids=batch["types"],
        attention_mask=batch["mask"],
        labels=batch["labels"],
        next_sentence_label=batch["next"],
    )
    return {"logits": outputs.prediction_logits, "next_logits": outputs.seq_relationship_logits}, outputs.loss


def named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by the names that a folder has; transformers stacks the experts of a folder that it reads."""
    parameters = dict(model.named_parameters())
    if not any(".experts." in name for name in parameters) and not dict(model.named_buffers()).keys() & model.state_dict().keys():
        return parameters
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def results(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take a step of SGD and return the batch, the logits and loss before the step and, as after/NAME, the weights after it."""
    logits, loss = computed(model, batch)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    after = {f"after/{key}": parameter.detach() for key, parameter in named(model).items()}
    numbers = {key: value.to(torch.int32) for key, value in batch.items()}
    return numbers | {key: value.detach() for key, value in logits.items()} | {"loss": loss.detach()} | after


def write(folder: Path, model: torch.nn.Module, batch: dict[str, torch.Tensor], **options: object) -> None:
    """Write one folder."""
    model.save_pretrained(folder, **options)
    save_file(results(model, batch), folder / "golden.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(f"{folder}: {sum(os.path.getsize(path) for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(FOLDER / "gpt2", spread(GPT2LMHeadModel(GPT2), 1), decoder_batch(2))
    write(FOLDER / "llama", spread(LlamaForCausalLM(LLAMA), 3), decoder_batch(4))
    write(FOLDER / "bert", spread(BertForPreTraining(BERT), 5), encoder_batch(6))
