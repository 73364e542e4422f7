"""Invalid JAX variables and a removed current folder are reported before a command runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jpipe.files import shown
from jpipe_train import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "value"), [("JAX_ENABLE_X64", "maybe"), ("JAX_NUM_CPU_DEVICES", "few")])
def test_a_variable_that_jax_refuses_is_named_in_one_line(name, value):
    environment = os.environ | {"PYTHONPATH": str(ROOT), name: value}
    command = [sys.executable, "-m", "jpipe_train.cli", "train", "none.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"jpipe: JAX does not accept {name}='{value}': ")
    assert done.stderr.endswith("; correct or unset the variable\n")
    assert done.stderr.count("\n") == 1


def test_other_errors_are_not_mistaken_for_invalid_jax_variables():
    assert cli._invalid_jax_setting(ValueError("JAX_ENABLE_X64")) is None


@pytest.fixture
def removed_folder(tmp_path, monkeypatch):
    """Change to a folder and remove it."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


@pytest.mark.usefixtures("removed_folder")
def test_a_removed_current_folder_is_reported_in_one_line(tmp_path, capsys, monkeypatch):
    assert cli.main(["train", str(tmp_path / "config.yaml")]) == 2
    message = "jpipe: the current folder cannot be used: No such file or directory; change to another folder (cd), and try again\n"
    assert capsys.readouterr() == ("", message)
    assert shown(tmp_path / "run") == str(tmp_path / "run"), "a run that goes on names its folder"
    monkeypatch.chdir(tmp_path)
