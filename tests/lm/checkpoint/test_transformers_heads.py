"""Models that judge whole texts: folders of transformers give jpipe the same numbers, and folders of jpipe give them to transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpipe_lm.checkpoint.huggingface import write_weights
from jpipe_lm.config.huggingface import families
from jpipe_train.checkpoint.export_request import ExportRequest
from tests import torch
from tests.lm.checkpoint import folders

PROGRAM = "tests.lm.checkpoint.heads_program"
ARCHITECTURES = {
    **{"bert": "BertForSequenceClassification", "bert-regression": "BertForSequenceClassification", "bert-choice": "BertForMultipleChoice"},
    **{"gpt2": "GPT2ForSequenceClassification", "llama3": "LlamaForSequenceClassification", "mistral": "MistralForSequenceClassification"},
    **{"qwen2": "Qwen2ForSequenceClassification", "qwen3": "Qwen3ForSequenceClassification", "phi3-short": "Phi3ForSequenceClassification"},
    **{"gemma2": "Gemma2ForSequenceClassification", "gemma3": "Gemma3TextForSequenceClassification"},
    **{"smollm3": "SmolLM3ForSequenceClassification", "mixtral": "MixtralForSequenceClassification"},
    **{"qwen2-moe": "Qwen2MoeForSequenceClassification", "qwen3-moe": "Qwen3MoeForSequenceClassification"},
    **{"gpt-oss": "GptOssForSequenceClassification", "glm4": "Glm4ForSequenceClassification"},
    **{"deepseek": "DeepseekV3ForSequenceClassification", "qwen3.5": "Qwen3_5TextForSequenceClassification"},
}
FEW = ("qwen3-moe",)  # the others only in `make test-all`

pytestmark = pytest.mark.slow


def run(*words: str | Path) -> str:
    """Run the program and return what it prints, or skip the test if transformers is not installed."""
    return torch.run("-m", PROGRAM, *words)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """Return folders that transformers wrote, each with its computed outputs."""
    folder = tmp_path_factory.mktemp("theirs")
    run("write", folder)
    return folder


def test_the_table_has_all_of_them():
    assert {name for family in families.FAMILIES for name in family.judges.values()} == set(ARCHITECTURES.values())


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in ARCHITECTURES])
def test_a_folder_of_transformers_computes_and_learns_the_same(name, theirs):
    folders.check_learned(theirs / name, load_file(theirs / name / "golden.safetensors"), atol=3e-5)


@pytest.mark.exhaustive
def test_folders_are_written_back_and_load_in_transformers(theirs, tmp_path):
    for name, architecture in ARCHITECTURES.items():
        (tmp_path / name).mkdir()
        overrides = ["model.labels=2"] if name == "bert-choice" else []
        config = folders.config(tmp_path / name, "llama", *overrides, file=theirs / name)
        stack, arrays = folders.read(theirs / name)
        out, golden = tmp_path / name / "out", load_file(theirs / name / "golden.safetensors")
        write_weights.write_huggingface(ExportRequest(str(folders.written(config, arrays, stack, rows=2)), str(out)), print)
        described = json.loads((out / "config.json").read_text())
        assert (described["architectures"], described["pad_token_id"]) == ([architecture], 0)
        tensors, expected = (load_file(folder / "model.safetensors") for folder in (out, theirs / name))
        assert tensors.keys() == expected.keys()
        assert all(np.array_equal(tensors[key], expected[key]) for key in tensors)
        save_file({key: golden[key] for key in ("tokens", "mask", "types", "labels") if key in golden}, out / "batch.safetensors")
    printed = run("load", *(tmp_path / name / "out" for name in ARCHITECTURES))
    assert "BertForSequenceClassification {0: 'no', 1: 'maybe', 2: 'yes'}" in printed
    for name in ARCHITECTURES:
        loaded, golden = load_file(tmp_path / name / "out" / "results.safetensors"), load_file(theirs / name / "golden.safetensors")
        assert loaded.keys() == golden.keys()
        for key, array in loaded.items():
            folders.close(array, golden[key], atol=3e-5)
