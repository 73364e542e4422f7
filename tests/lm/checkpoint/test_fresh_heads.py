"""Folders of models that judge whole texts, and runs with a fresh head on a language model."""

import json
import re

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jpipe import InputError
from jpipe_lm.checkpoint import huggingface as folder_of
from jpipe_lm.checkpoint.huggingface import write_weights
from jpipe_lm.config.huggingface import read_config, write_config
from jpipe_lm.config.model_config import ModelConfig
from jpipe_train.assemble.build import build
from jpipe_train.checkpoint import warm_start
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from tests.lm.checkpoint import folders
from tests.lm.checkpoint.folders import GOLDEN, copied
from tests.lm.config.test_huggingface import content_of

TO_CLASSES = {"architectures": ["BertForSequenceClassification"]}
NAMED = TO_CLASSES | {"id2label": {"1": "b", "0": "a"}, "label2id": {"a": 0, "b": 1}}


def labels(seed: int, batch_size: int):
    """Return training and validation data with three classes, for `data.target`."""
    tokens = np.zeros((batch_size, folders.LENGTH), np.int32)
    batch = {"tokens": tokens, "segments": tokens + 1}, np.arange(batch_size, dtype=np.int32) % 3
    return [batch] * 2, [batch]


def begun(name, tmp_path, file=None):
    """Return what a run that classifies reads from a golden folder, its parameters, and the lines that it prints."""
    target = f"data={{target: '{__name__}:labels'}}"
    config = folders.config(tmp_path, name, "model.head=classification", "model.labels=3", target, file=file)
    pipe, batches = build(config, Reporter(1, 1, "", Console(quiet=True)))
    lines: list[str] = []
    return warm_start.load(config, pipe, batches.train[0], Team(None), lines.append), lines


@pytest.mark.parametrize(
    ("name", "taken"),
    [("bert", {"pooler/kernel": "bert.pooler.dense.weight", "pooler/bias": "bert.pooler.dense.bias"}),
     ("llama", {"norm/scale": "model.norm.weight"}), ("masked", {})],
)  # fmt: skip
def test_a_classifier_begins_with_a_language_model_and_says_that_its_head_is_fresh(name, taken, tmp_path):
    original = "bert" if name == "masked" else name
    file = None
    if name == "masked":  # without a pooler
        leave_out = ("bert.pool", "cls.seq_r")
        file = copied(original, tmp_path / "masked", lambda tensors: {key: t for key, t in tensors.items() if key[:9] not in leave_out},
                      {"architectures": ["BertForMaskedLM"]})  # fmt: skip
    params, lines = begun(original, tmp_path, file)
    tensors = load_file(GOLDEN / original / "model.safetensors")
    assert params["head"].keys() == taken.keys()
    for path, tensor in taken.items():
        np.testing.assert_array_equal(params["head"][path], tensors[tensor].T)
    assert params["block_1"].keys() == params["block_0"].keys() != set()
    first = {"bert": "score/bias", "llama": "score/kernel", "masked": "pooler/bias"}[name]
    (line,) = lines
    assert re.search(rf"3 of 4 layers from .*; at least partly fresh: head \('head/{first}' is missing\)$", line)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (TO_CLASSES, {"head": "classification", "labels": 2}),
        (TO_CLASSES | {"num_labels": 5}, {"head": "classification", "labels": 5}),
        (NAMED, {"head": "classification", "labels": ["a", "b"]}),
        (TO_CLASSES | {"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}}, {"head": "classification", "labels": 3}),
        (TO_CLASSES | {"id2label": {"0": "LABEL_0"}}, {"head": "regression"}),
        (TO_CLASSES | {"num_labels": 1, "problem_type": "regression"}, {"head": "regression"}),
        ({"architectures": ["BertForMultipleChoice"]}, {"head": "multiple_choice"}),
        ({"id2label": {"0": "a", "1": "b"}}, {}),  # in a language model they have no effect
    ],
)
def test_config_json_says_head_and_labels(changes, expected):
    keys = read_config.parse(content_of("bert", **changes)).keys
    assert {key: keys[key] for key in ("head", "labels") if key in keys} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem_type": "multi_label_classification"}, "problem_type: expected 'single_label_classification' or 'regression', found"),
        ({"id2label": {"0": "a", "2": "b"}}, "expected id2label to have the keys 0 to 1, found other keys"),
        ({"problem_type": "regression"}, "expected one label for regression, found 2"),
        ({"problem_type": "single_label_classification", "num_labels": 1}, "expected two labels or more for single_label_classification"),
        ({"id2label": {"0": "a", "1": "a"}}, "labels: expected each name once, found 'a' twice"),
        ({"id2label": {"0": "a", "1": 3}}, "id2label"),
    ],
)
def test_labels_that_jpipe_does_not_have(changes, message):
    with pytest.raises(InputError, match=message):
        read_config.parse(content_of("bert", **TO_CLASSES | changes))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, ["a", "b"]),
        ({"labels": 2}, ["a", "b"]),
        ({"labels": ["b", "a"]}, r"model.labels: expected \[\"a\", \"b\"\] as in .*, found \['b', 'a'\]; remove model.labels"),
        ({"labels": 3}, r"model.labels: expected \[\"a\", \"b\"\] as in .*, found 3; remove model.labels"),
        ({"head": "regression"}, "model.head: expected \"classification\" as in .*, found 'regression'; remove model.head"),
    ],
)
def test_a_section_agrees_with_the_labels_of_a_folder(section, expected, tmp_path):
    folder = copied("bert", tmp_path / "folder", changes=NAMED)
    if isinstance(expected, list):
        assert read_config.fill_section(section, folder, "c", partial=False)["labels"] == expected
        return
    with pytest.raises(InputError, match=expected):
        read_config.fill_section(section, folder, "c", partial=False)


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        ("{preset: bert-tiny, head: multiple_choice, labels: 3}", "BertForMultipleChoice"),
        pytest.param(
            "{preset: llama-tiny, head: classification, labels: [a, b]}", "LlamaForSequenceClassification", marks=pytest.mark.exhaustive
        ),
        ("{preset: gpt2-tiny, head: regression}", "GPT2ForSequenceClassification"),
        pytest.param("{preset: mixtral-tiny, head: classification, labels: 3}", "MixtralForSequenceClassification", marks=pytest.mark.slow),
    ],
)
def test_fresh_weights_are_written_and_read_again(model, architecture, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"model: {model}\ndata: {{format: labels, path: a, tokenizer: b}}\n")
    write_weights.write_huggingface(ExportRequest(str(path), str(tmp_path / "out")), print)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [architecture]
    keys, section = read_config.read(tmp_path / "out").keys, config_file.load(path).model
    assert {key: keys[key] for key in ("head", "labels") if key in keys}.items() <= section.model_dump().items()
    source = folder_of.source(tmp_path / "out", head=section.head)
    assert {name for name in source.specs if name.startswith("head/score/")} == (
        {"head/score/kernel", "head/score/bias"} if "bert" in model else {"head/score/kernel"}
    )


def test_no_decoder_chooses_in_transformers():
    with pytest.raises(InputError, match=r"no architecture can express this model; the most similar: .* has no model.head multiple_choice"):
        write_config.to_json_keys(ModelConfig(preset="llama-tiny", head="multiple_choice", labels=2))
