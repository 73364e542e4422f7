"""What a config says is checked before a device starts and before data are read."""

import sys
from pathlib import Path

import jax
import pytest
from jax._src import xla_bridge

import jpipe
from jpipe import InputError
from jpipe.checkpoints import folders
from jpipe_lm.generate import model_source
from jpipe_lm.generate import request as generate_request
from jpipe_train.config.config import Config
from jpipe_train.config.config_file import to_yaml
from jpipe_train.data import data
from jpipe_train.plan import plan as planning
from jpipe_train.plan.inputs import Request
from jpipe_train.run import evaluate, loop
from jpipe_train.run.requests import EvaluateRequest
from tests.packages import ROOT

CHAT = {
    "format": "chat",
    "path": f"{ROOT}/examples/chat/conversations.jsonl",
    "validation_fraction": 0.05,
    "tokenizer": f"{ROOT}/examples/chat/tokenizer.json",
}
MODEL = {"vocab_size": 384, "depth": 1, "width": 8, "heads": 2, "seq_len": 8}
MLP = {"model": {"target": "examples.mlp:model"}, "data": {"target": "examples.mlp:data"}}


def changed(tiny: dict, sections: dict) -> Config:
    """Return the config of a tiny run with other keys, or with other sections where they have nothing of the tiny run's."""
    replaced = {"format", "target", "sources"}
    return Config.model_validate(
        tiny | {name: keys if replaced & keys.keys() else tiny.get(name, {}) | keys for name, keys in sections.items()}
    )


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    """Fail where a device would be asked for, or data read, and work in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("too early")

    for name in ("backends", "get_backend", "devices", "local_devices", "device_count"):
        monkeypatch.setattr(xla_bridge, name, refuse)
    monkeypatch.setattr(jax, "devices", refuse)
    for name in ("load", "held_out"):
        monkeypatch.setattr(data, name, refuse)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"path": "missing.txt"}}, "data.path: 'missing.txt' does not exist"),
        ({"data": {"validation_path": "missing.txt", "validation_fraction": 0.05}}, "data.validation_path: 'missing.txt' does not exist"),
        ({"data": {"sources": [{"path": "missing.txt"}]}}, "data.sources.0.path: 'missing.txt' does not exist"),
        ({"data": CHAT | {"chat_template": "missing.jinja"}, "model": MODEL}, "data.chat_template: cannot read '.*missing.jinja'"),
        ({"data": CHAT | {"chat_template": "broken"}, "model": MODEL}, "chat template: 'broken': .*; correct the template"),
        (
            {"data": CHAT | {"tokenizer": "broken"}, "model": MODEL},
            "expected a tokenizer.json .*, found one that fails",
        ),
        ({"data": CHAT | {"tokenizer": "missing.json"}, "model": MODEL}, "data.tokenizer: cannot read 'missing.json'"),
        ({"data": CHAT}, "model.vocab_size: expected at least 384, .*found 256"),
        ({"data": CHAT | {"path": "rows.parquet"}, "model": MODEL}, "expected the library pyarrow to read it, but pyarrow is not"),
        ({"data": {"format": "tokens", "path": "folder"}}, "data.path: cannot read 'folder/tokens.json'"),
        ({"warm_start": {"file": "missing"}}, "warm_start.file: 'missing': expected a safetensors file"),
        ({"run": {"dir": "broken/run"}}, "run.dir: cannot write 'broken/run': Not a directory"),
        ({"run": {"dir": "used"}}, "run.dir: expected a new or empty folder, found 'loss.png' in 'used'"),
        ({"plan": {"num_stages": 8}}, "plan: expected between 1 and 3 stages"),
        ({"plan": {"file": "auto", "links": {"sums": "int8"}}}, "plan.links.sums: expected no search for a plan with 'int8'"),
        ({"plan": {"file": "auto", "links": {"bottleneck": {"width": 2}}}}, "plan.links.bottleneck: expected no search for a plan with"),
        ({"plan": {"num_stages": 2, "max_delay": 0.5}}, "plan.max_delay: expected a plan with a mean delay of at most 0.5"),
        ({"plan": {"num_stages": 2, "mesh": {"model": 4}, "rules": {"heads": "model"}}}, "model.heads"),
        ({"optimizer": {"per_stage": {"learning_rate": [0.1, 0.1, 0.1]}, "learning_rate": None}}, "optimizer.per_stage: learning_rate"),
        ({"optimizer": {"arguments": {"b3": 1}}}, "optimizer.arguments: 'adamw' has no argument 'b3'"),
        ({"optimizer": {"name": "nowhere:rule"}}, "optimizer.name: .*nowhere"),
        ({"optimizer": {"lr_schedule": "polynomial_schedule", "lr_arguments": {"pow": 2}}}, "optimizer.lr_arguments: .*'pow'"),
        ({"train": {"stop": {"metric": "val_lost", "patience": 1}}}, "train.stop.metric: expected a result of the validations"),
        ({"eval": {"metrics": {"mine": "nowhere:metric"}}}, "eval.metrics.mine: .*nowhere"),
        ({"loss": {"target": "examples.mlp:lost"}}, "loss.target: .*lost"),
        ({**MLP, "model": {"target": "examples.mlp:model", "arguments": {"wide": 3}}}, "model.arguments: .*'wide'"),
        ({**MLP, "data": MLP["data"] | {"arguments": {"rowz": 3}}}, "data.arguments: .*'rowz'"),
    ],
)
def test_a_mistake_is_told_before_devices_start_and_data_are_read(sections, message, tiny, tmp_path, monkeypatch):
    (tmp_path / "broken").write_text("{% endif %} {")
    (tmp_path / "folder").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used/loss.png").touch()
    (tmp_path / "rows.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    config = changed(tiny, sections)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        loop.main(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_right_config_passes_and_leaves_nothing(tiny, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    for config in (tiny, tiny | {"data": CHAT, "model": MODEL}, tiny | MLP | {"run": {"dir": None}}):
        with pytest.raises(AssertionError, match="too early"):
            loop.main(Config.model_validate(config))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def run_of(config: Config, folder: Path) -> str:
    """Write what `jpipe evaluate` reads of a run before its checkpoint, and return the folder."""
    (folder / "checkpoints/4").mkdir(parents=True)
    (folder / "checkpoints/4" / folders.MARKER).touch()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "plan.json").write_text(jpipe.Plan.even(["embed", "block_0", "head"], num_stages=2, microbatches=2).to_json())
    return str(folder)


@pytest.mark.parametrize(
    ("sections", "request_", "message"),
    [
        ({}, {"data": "missing.txt"}, "^--data: 'missing.txt' does not exist"),
        ({}, {"data": "rows.csv"}, "^--data: expected text, found that 'rows.csv' is "),
        ({"data": CHAT, "model": MODEL}, {"data": "x" * 5000}, "^--data: .*File name too long"),
        ({"data": {"sources": [{"path": "here.txt"}]}}, {"data": "missing.txt"}, "^--data: 'missing.txt' does not exist"),
        (
            {"data": CHAT | {"tokenizer": "missing.json"}, "model": MODEL},
            {"data": "here.txt"},
            "data.tokenizer: cannot read 'missing.json'",
        ),
        (
            {"data": {"validation_path": "missing.txt", "validation_fraction": 0.05}},
            {},
            "data.validation_path: 'missing.txt' does not exist",
        ),
        (MLP, {"data": "here.txt", "allow_code": True}, "^--data: the data come from 'examples.mlp:data'"),
        ({"eval": {"metrics": {"mine": "nowhere:metric"}}}, {"allow_code": True}, "eval.metrics.mine: .*nowhere"),
    ],
)
def test_an_evaluation_tells_a_mistake_as_early(sections, request_, message, tiny, tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "here.txt").write_text("text")
    folder = run_of(changed(tiny, sections), tmp_path / "trained")
    with pytest.raises(InputError, match=message):
        evaluate.main(EvaluateRequest(folder, **request_))


@pytest.mark.parametrize("topology", ["local", "two.yaml"])
@pytest.mark.parametrize(
    ("sections", "request_", "files", "message"),
    [
        ({"data": {"path": "missing.txt"}}, {}, {}, "data.path: 'missing.txt' does not exist"),
        ({"optimizer": {"arguments": {"b3": 1}}}, {}, {}, "optimizer.arguments: 'adamw' has no argument 'b3'"),
        (
            {"optimizer": {"clip_global_norm": 1.0}},
            {"agree": 4, "schedules": ("pipedream_2bw",)},
            {},
            "pipedream_2bw cannot be used with optimizer.clip_global_norm",
        ),
        ({"plan": {"links": {"sums": "int8"}}}, {}, {}, "plan.links.sums: expected no search for a plan with 'int8'"),
        ({}, {}, {"profile": "missing.json"}, "--profile: cannot read 'missing.json'"),
        ({}, {"topology": "missing.yaml", "meshes": ("model=2",)}, {}, "--topology: cannot read 'missing.yaml'"),
    ],
)
def test_the_search_for_a_plan_tells_a_mistake_as_early(topology, sections, request_, files, message, tiny, tmp_path):
    (tmp_path / "two.yaml").write_text("{format: jpipe-topology/1, levels: [{count: 2, bandwidth: 1.0e+9}]}")
    (tmp_path / "tiny.yaml").write_text(to_yaml(changed(tiny, sections)))
    with pytest.raises(InputError, match=message):
        planning.main(Request(config="tiny.yaml", **{"topology": topology} | request_ | files))


def test_a_model_that_cannot_generate_is_told_before_a_checkpoint_is_read(tiny, tmp_path):
    folder = run_of(changed(tiny, MLP), tmp_path / "trained")
    with pytest.raises(InputError, match="generate: expected a built-in model"):
        model_source.find(generate_request.Request(folder), print)
