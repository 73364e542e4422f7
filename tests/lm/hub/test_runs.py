"""Runs from models and data by name, and uploads of exports."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers
import yaml

from jpipe_train import cli
from jpipe_train.config import config_file
from tests.lm.checkpoint.folders import GOLDEN
from tests.lm.hub.conftest import forget
from tests.lm.hub.server import TOKEN
from tests.train.conftest import SENTENCE

WEIGHTS = (GOLDEN / "llama" / "model.safetensors").read_bytes()


def model() -> dict[str, bytes]:
    """Return the files of a model of 64 words, as the Hub has them."""
    words = {word: i for i, word in enumerate(["?", "<s>", "</s>", *dict.fromkeys(SENTENCE.decode().replace(";", "").split())])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config = (GOLDEN / "llama" / "config.json").read_bytes()
    return {"config.json": config, "model.safetensors": WEIGHTS, "tokenizer.json": tokenizer.to_str().encode(), "modeling.py": b"1 / 0"}


def rows(text: bytes) -> dict[str, bytes]:
    words = text.decode().split()
    lines = [json.dumps({"text": " ".join(words[i % len(words) :] + words * (i // len(words)))}) for i in range(60)]
    return {"data/train.jsonl": "\n".join(lines).encode()}


@pytest.fixture
def config(hub, tmp_path) -> Path:
    """Return the file of a config that names a model, its tokenizer and a data set."""
    hub.add("models/me/llama", model())
    hub.add("datasets/me/texts", rows(SENTENCE))
    content = {
        "run": {"dir": str(tmp_path / "run")},
        "warm_start": {"file": "hf:me/llama"},
        "data": {"format": "text", "path": "hf:datasets/me/texts/data/*.jsonl", "tokenizer": "hf:me/llama", "validation_fraction": 0.2},
        "train": {"steps": 2, "batch_size": 4, "eval_every": 2, "eval_batches": 1, "trace_batches": 0},
        "model": {"seq_len": 8},
        "plan": {"schedule": "gpipe", "num_stages": 2, "microbatches": 2},
        "checkpoint": {"every": 1},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def with_commits(hub) -> dict[str, str]:
    """Return the names of the config with the commits of the main branches."""
    commits = {name: repo.branches["main"] for name, repo in hub.repos.items()}
    llama = f"hf:me/llama@{commits['models/me/llama']}"
    return {"file": llama, "tokenizer": llama, "path": f"hf:datasets/me/texts@{commits['datasets/me/texts']}/data/*.jsonl"}


@pytest.mark.usefixtures("no_report")
def test_a_run_records_the_commits_and_resumes_with_them(hub, config, tmp_path, capsys):
    names = with_commits(hub)
    assert cli.main(["train", str(config)]) == 0
    assert sorted(hub.downloads()) == ["config.json", "model.safetensors", "tokenizer.json", "train.jsonl"]
    recorded = config_file.load_resolved(tmp_path / "run" / "config.yaml")
    assert names == {"file": recorded.warm_start.file, "tokenizer": recorded.data.tokenizer, "path": recorded.data.path}
    assert "warm start: 4 of 4 layers" in capsys.readouterr().out
    hub.add("models/me/llama", model() | {"model.safetensors": b"another"})
    hub.add("datasets/me/texts", rows(b"another text"))
    forget()
    assert cli.main(["train", str(config), "--set", "train.steps=4"]) == 0
    assert "resumes at step 2" in capsys.readouterr().out
    recorded = config_file.load_resolved(tmp_path / "run" / "config.yaml")
    assert names == {"file": recorded.warm_start.file, "tokenizer": recorded.data.tokenizer, "path": recorded.data.path}
    assert cli.main(["generate", str(tmp_path / "run"), "--prompt", "the quick", "--tokens", "2"]) == 0
    assert cli.main(["evaluate", str(tmp_path / "run"), "--data", names["path"]]) == 0


def test_a_config_needs_no_weights(hub, config, capsys):
    assert cli.main(["simulate", str(config), "--no-compile"]) == 0
    assert "model.safetensors" not in hub.downloads()
    hub.wrong = {"config.json"}
    hub.add("models/me/llama", model() | {"config.json": b'{"another": 1}'})
    forget()
    assert cli.main(["simulate", str(config), "--no-compile"]) == 2
    assert "warm_start.file: expected 'config.json' of hf:me/llama@" in capsys.readouterr().err


def test_text_is_generated_by_a_model_of_the_hub(hub, capsys):
    hub.add("models/me/llama", model())
    assert cli.main(["generate", "hf:me/llama", "--prompt", "the quick", "--tokens", "3"]) == 0
    assert len(capsys.readouterr().out.split()) == 3


def test_tokens_are_prepared_from_a_data_set_of_the_hub(hub, tmp_path):
    hub.add("models/me/llama", model())
    hub.add("datasets/me/texts", rows(SENTENCE))
    assert cli.main(["data", "prepare", "hf:datasets/me/texts", "--tokenizer", "hf:me/llama", "--out", str(tmp_path / "tokens")]) == 0
    assert (tmp_path / "tokens" / "tokenizer.json").read_bytes() == model()["tokenizer.json"]


@pytest.mark.usefixtures("no_report")
def test_an_export_is_uploaded_after_asking(hub, config, tmp_path, monkeypatch, capsys):
    assert cli.main(["train", str(config)]) == 0

    def export(*options: str, answer: str | None = None) -> tuple[int, str]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        answers = io.StringIO(answer or "")
        answers.isatty = lambda: answer is not None
        monkeypatch.setattr(sys, "stdin", answers)
        capsys.readouterr()
        arguments = ["export", str(tmp_path / "run"), "--layout", "huggingface", "--out", str(tmp_path / "out"), *options]
        return cli.main(arguments), "".join(capsys.readouterr())

    def uploaded(name: str) -> dict[str, bytes] | None:
        repo = hub.repos.get(f"models/{name}")
        return None if repo is None else repo.commits[repo.branches["main"]]

    for options, answer, words in (
        (["--push", "me/tuned"], "y", "--push: expected a name hf:…, found 'me/tuned'; correct it"),
        (["--push", "hf:me/tuned@v1"], "y", "--push: expected a model, as hf:OWNER/NAME, found hf:me/tuned@v1; leave out the rest"),
        (["--push", "hf:me/tuned"], None, "--push: expected a terminal, to ask before the upload, found none; add --yes"),
        (["--push", "hf:me/tuned"], "y", "--push: expected a token that may write, found none; log in with hf auth login, or set HF_TOKEN"),
        (["--yes"], None, "export: --yes and --public have no effect without --push"),
    ):
        code, lines = export(*options, answer=answer)
        assert (code, words in lines, (tmp_path / "out").exists()) == (2, True, False), lines
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, lines = export("--push", "hf:me/tuned", answer="no\n")
    assert (code, uploaded("me/tuned")) == (0, None)
    assert "hf:me/tuned is new and is private; to upload: 4 files, " in lines
    assert "  model.safetensors\n" in lines
    assert f"nothing was uploaded; the export is in {tmp_path / 'out'}" in lines
    code, lines = export("--push", "hf:me/tuned", answer="y\n")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert (code, uploaded("me/tuned")) == (0, written)
    assert hub.repos["models/me/tuned"].private
    assert "uploaded hf:me/tuned@" + hub.repos["models/me/tuned"].branches["main"] in lines
    code, lines = export("--push", "hf:me/open", "--yes", "--public")
    assert (code, uploaded("me/open"), hub.repos["models/me/open"].private) == (0, written, False)
    code, lines = export("--push", "hf:me/open", "--yes")
    assert "hf:me/open exists and is public: everyone can read it; to upload: 4 files" in lines
    hub.down = 500
    monkeypatch.setattr("time.sleep", lambda _: None)
    code, lines = export("--push", "hf:me/open", "--yes")
    assert (code, "--push: cannot upload hf:me/open: the server answers 500" in lines) == (1, True), lines
