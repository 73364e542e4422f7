"""What `test_peft.py` runs where PEFT is.

    .venv-torch/bin/python -m tests.lm.checkpoint.peft_program write FOLDER
    .venv-torch/bin/python -m tests.lm.checkpoint.peft_program load KIND BASE ADAPTERS

`write` puts a folder of a model and, inside of it, one of adapters for each of `WRITTEN`; the latter has a golden.safetensors with a batch,
its logits and loss, and as after/NAME the adapters after a step of SGD. `load` computes the logits of the batch.safetensors in ADAPTERS.
"""

import copy
import sys
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.lm.checkpoint.families import MODELS
from tests.lm.checkpoint.golden.write_golden import GPT2, LLAMA, RATE, computed, decoder_batch, spread

WRITTEN = {
    "llama": {"r": 2, "lora_alpha": 6, "target_modules": "all-linear"},
    "qwen2": {
        **{"r": 3, "lora_alpha": 5, "use_rslora": True},
        **{"target_modules": ["q_proj", "v_proj", "o_proj", "mlp.down_proj"], "exclude_modules": ["o_proj", "lm_head"]},
    },
    "qwen2-moe": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj", "up_proj"]},
    "gemma4": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},  # half of the blocks have no v_proj
    "gpt2": {"r": 2, "lora_alpha": 6, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
}


def model_of(name: str) -> torch.nn.Module:
    """Return a tiny model with random weights."""
    known = {"llama": ("LlamaForCausalLM", LLAMA), "gpt2": ("GPT2LMHeadModel", GPT2)}
    architecture, config = known[name] if name in known else MODELS[name]
    kind = getattr(transformers, architecture)
    config = copy.deepcopy(config)
    return spread(kind(kind.config_class(**config) if isinstance(config, dict) else config), 1)


def write_all(folder: Path) -> None:
    """Write the folders."""
    for seed, (name, options) in enumerate(WRITTEN.items()):
        base = model_of(name)
        base.save_pretrained(folder / name)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        generator = torch.Generator().manual_seed(seed)
        chosen = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
        with torch.no_grad():
            for parameter in chosen.values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        to = folder / name / "adapters"
        model.save_pretrained(to)
        batch = decoder_batch(30 + seed)
        logits, loss = computed(model, batch)
        loss.backward()
        after = {f"after/{key.replace('.default', '')}": (p - RATE * p.grad).detach() for key, p in chosen.items()}
        save_file(
            {**{key: value.to(torch.int32) for key, value in batch.items()}, **logits, "loss": loss.detach(), **after},
            to / "golden.safetensors",
        )


def load(kind: str, base: Path, folder: Path) -> None:
    """Load the model of a folder with the adapters of another one, and save its logits."""
    options = {"num_labels": 3, "pad_token_id": 0} if "Classification" in kind else {}
    model = peft.PeftModel.from_pretrained(getattr(transformers, kind).from_pretrained(base, **options), folder).eval()
    batch = load_file(folder / "batch.safetensors")
    mask = {"attention_mask": batch["mask"].long()} if "mask" in batch else {}
    with torch.no_grad():
        logits = model(batch["tokens"].long(), **mask).logits
    save_file({"logits": logits.contiguous()}, folder / "results.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "write":
        write_all(Path(sys.argv[2]))
    else:
        load(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
