"""The wheel contains every file of the packages, .gitignore drops none, and its name is not that of another project."""

import importlib.machinery
import re
import subprocess
import tomllib
import types

import pytest
from hatchling.builders.wheel import WheelBuilder

from examples.papers.samples.make import SAMPLES
from jpipe_train import commands
from tests.packages import PACKAGES, ROOT


def git(*words: str) -> list[str]:
    """Return the lines that a git command prints, or skip the test outside a clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def test_every_file_of_the_packages_is_in_the_wheel():
    tracked = {name.removeprefix("planner/").removeprefix("train/") for name in git("ls-files", *map(str, PACKAGES.values()))}
    assert len(tracked) > 200
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert tracked - packed == set()


def test_no_file_of_the_project_is_ignored():
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_gitignore_patterns_start_at_the_root():
    """A plain name matches every folder of that name, also inside the packages, and hatchling leaves out what git ignores."""
    rules = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line and not line.startswith("#")]
    assert [rule for rule in rules if not rule.startswith("/")] == ["__pycache__/"]


def test_every_folder_of_the_packages_is_a_package():
    for package in PACKAGES.values():
        folders = {path.parent for path in package.rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_nobody_is_told_to_install_another_project():
    """The name `jpipe` belongs to another project in package indexes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "jpipe-train"
    assert project["scripts"] == {"jpipe": "jpipe_train.cli:main"}
    wrong = re.compile(r"(pip3?|uv|pipx) .*(install|add|run) .*['\" ]jpipe(\[|[=>'\"`;,. )]|$)|\bjpipe\[(wandb|bleu|dev|cuda|tpu)", re.M)
    for name in git("ls-files", "*.py", "*.md", "*.yaml", "*.toml", "*.txt", "Makefile", ".ci"):
        match = wrong.search((ROOT / name).read_text(encoding="utf-8"))
        assert match is None or name == "tests/test_wheel.py", f"{name}: {match[0]}"


def test_every_command_of_an_installed_jpipe_is_tried():
    """`.ci/check-wheel` runs them and so detects files missing in the wheel."""
    loader = importlib.machinery.SourceFileLoader("commands_of_pages", str(ROOT / ".ci" / "commands-of-pages"))
    tries = types.ModuleType(loader.name)
    loader.exec_module(tries)
    shown = tries.in_pages(ROOT)
    names = [f"{name} {inner}" for name in commands.groups() for inner in commands.names(name)]
    names += [name for name in commands.names() if name not in commands.groups()]
    assert len(names) > 10
    assert tries.without_try(names, shown) == []
    assert tries.without_try([*names, "new", "data new"], shown) == ["new", "data new"]
    assert {command[-1] for command in tries.PAPERS if command[2] == "examples.papers.samples"} == set(SAMPLES)
