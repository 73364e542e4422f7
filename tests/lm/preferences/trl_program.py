"""What `test_trl.py` runs where TRL is.

    .venv-torch/bin/python -m tests.lm.preferences.trl_program FOLDER LOSS OPTIMIZER

FOLDER has a tokenizer.json and pairs.jsonl. A tiny Llama with random weights is written to FOLDER/model, if it is not there, and is trained
for three steps on all pairs at once; its weights are written to FOLDER/LOSS-OPTIMIZER, and the logged numbers of each step to
FOLDER/LOSS-OPTIMIZER.json.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import datasets
import torch
import transformers
import trl
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

LOSSES = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.3}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0}),
    "orpo": (ORPOTrainer, ORPOConfig, {"beta": 0.4}),
}
OPTIMIZERS = {"sgd": {"optim": "sgd", "learning_rate": 0.5}, "adamw": {"optim": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.1}}


def main(folder: Path, loss: str, optimizer: str) -> None:
    """Train, and write the numbers."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    if not (folder / "model").exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.3
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer, arguments, options = LOSSES[loss]
    pairs = datasets.Dataset.from_list([json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()])
    out = folder / f"{loss}-{optimizer}"
    run = trainer(
        model=model,
        args=arguments(
            output_dir=str(out),
            per_device_train_batch_size=len(pairs),
            max_steps=3,
            logging_steps=1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            remove_unused_columns=False,
            **OPTIMIZERS[optimizer],
            **options,
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    run.train()
    model.save_pretrained(out)
    (folder / f"{loss}-{optimizer}.json").write_text(json.dumps(run.state.log_history[:3]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
