"""The configs and examples of an installed jpipe."""

import subprocess
import sys
from pathlib import Path

import pytest

from jpipe_train.cli import main
from jpipe_train.config import shipped_configs

ROOT = Path(__file__).parents[2]


def test_configs_are_listed_with_a_description(capsys):
    assert main(["configs"]) == 0
    *listed, hint = capsys.readouterr().out.splitlines()
    configs = {path.relative_to(ROOT).as_posix() for folder in ("configs", "examples") for path in (ROOT / folder).rglob("*.yaml")}
    assert {line.split()[0] for line in listed} == configs
    assert all(len(line.split()) > 5 for line in listed)
    assert "jpipe configs copy" in hint


def test_configs_are_copied_and_nothing_is_overwritten_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "copy", "mlp"]) == 0
    assert capsys.readouterr().out == "copied: examples/mlp.yaml\ncopied: examples/mlp.py\ncopied: examples/__init__.py\n"
    user_file = tmp_path / "examples" / "mlp.py"
    user_file.write_text("mine")
    assert main(["configs", "copy"]) == 2
    refusal = "'examples/mlp.py' exists with other content; nothing was copied; copy to another folder with --to, or add --overwrite"
    assert capsys.readouterr() == ("", f"jpipe: configs copy: {refusal}\n")
    assert user_file.read_text() == "mine"
    assert not (tmp_path / "configs").exists()
    assert main(["configs", "copy", "--overwrite"]) == 0
    every = shipped_configs.shipped()
    counts = [sum(name.startswith(folder) for name in every) for folder in ("configs/", "examples/")]
    assert capsys.readouterr().out.splitlines() == [
        f"copied: {counts[0]} files in configs",
        f"copied: {counts[1] - 3} files in examples",
        "overwritten: examples/mlp.py",
        f"already up to date: 2 of {len(every)} files",
    ]
    assert all((tmp_path / name).read_bytes() == file.read_bytes() for name, file in every.items())


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("gnmt-8-small", "examples/papers", marks=pytest.mark.exhaustive),
        pytest.param("bert-small", "examples/papers", marks=pytest.mark.exhaustive),
        ("gpt-small", None),
    ],
)
def test_with_a_config_comes_the_code_that_it_names(name, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "copy", name]) == 0
    copied = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    expected = {file for file in shipped_configs.shipped() if code and file.startswith(code) and file.endswith(".py")}
    assert copied == {f"configs/papers/{name}.yaml", *expected, *(["examples/__init__.py"] if code else [])}
    if code is not None:
        program = (
            "import pathlib, examples.papers.translate as t; assert pathlib.Path(t.__file__).is_relative_to(pathlib.Path.cwd().resolve())"
        )
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("copy gpt-byte", "configs copy: unknown config 'gpt-byte'; did you mean 'gpt-bytes'?"),
        ("copy --to file/x", "configs copy: cannot write 'file/x/configs': Not a directory; choose another folder with --to"),
        (
            "copy --to ~nobody-of-that-name/x",
            "configs copy --to: '~nobody-of-that-name/x' begins with an unknown user's home folder; give the full path",
        ),
        ("gpt-bytes", "configs: expected no word or the word copy, found 'gpt-bytes'; did you mean jpipe configs copy gpt-bytes?"),
        ("--overwrite", "configs: --to and --overwrite have no effect without copy; did you mean jpipe configs copy?"),
    ],
)
def test_a_config_that_cannot_be_copied_is_reported(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["configs", *arguments.split()]) == 2
    assert capsys.readouterr() == ("", f"jpipe: {message}\n")
