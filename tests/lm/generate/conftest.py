"""A command line and a model of whole words, which the tests of generation share."""

import io
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

import jpipe.checkpoints.writing
from jpipe_lm.models.layers import layers
from jpipe_train import cli
from jpipe_train.config import config_file
from tests.train.conftest import changed, tiny_of

GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden"
WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, 64))]
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% if m.role == 'assistant' %}w31{% endif %}{% endfor %}"


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line, with a text on standard input if one is given; gives exit code, standard output and standard error."""
    jax.devices()  # as many as the tests have, before a command asks for more

    def run(*arguments: str, said: str | None = None, is_terminal: bool = False) -> tuple[int, str, str]:
        if said is not None:
            stdin = io.TextIOWrapper(io.BytesIO(said.encode("utf-8", "surrogateescape")))
            stdin.isatty = lambda: is_terminal
            monkeypatch.setattr(sys, "stdin", stdin)
        code = cli.main(["generate", *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a Hugging Face folder with a tokenizer of whole words."""
    place = tmp_path / "llama"
    shutil.copytree(GOLDEN / "llama", place)
    save_tokenizer(place, WORDS)
    return place


@pytest.fixture(scope="session")
def written_run(tmp_path_factory) -> Path:
    """Write the folder of a run over bytes that has random weights after 4 steps."""
    folder = tmp_path_factory.mktemp("written") / "run"
    config, rng = changed(tiny_of(Path("text.txt"), folder)), np.random.default_rng(0)
    specs = layers(config.model).specs(jax.ShapeDtypeStruct((1, config.model.seq_len), np.int32))
    params = {name: jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(spec.dtype), spec.params) for name, spec in specs.items()}
    jpipe.checkpoints.writing.write_layers(folder, 4, {name: {"params": {"0": tree}} for name, tree in params.items()}, 0)
    jpipe.checkpoints.writing.complete(folder, 4, 1, {})
    (folder / "config.yaml").write_text(config_file.to_yaml(config))
    return folder


@pytest.fixture
def run_of_bytes(written_run, tmp_path, monkeypatch) -> str:
    """Change to a folder in which `run` is the folder of a run over bytes, and return that name."""
    shutil.copytree(written_run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return "run"


def save_tokenizer(folder: Path, words: Sequence[str | None], special: Sequence[str] = ()) -> None:
    """Save a tokenizer of whole words, whose tokens are their places; there is none for None."""
    vocabulary = {word: i for i, word in enumerate(words) if word is not None}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.add_special_tokens(list(special))
    rules.save(str(folder / "tokenizer.json"))


def make_chat(folder: Path, template: str = TEMPLATE) -> None:
    """Make the model of a folder one for chat; w31 ends an answer: the model comes to it after others."""
    save_tokenizer(folder, WORDS, ["<s>", "w31"])
    (folder / "chat_template.jinja").write_text(template)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": None}))
