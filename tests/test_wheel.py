"""The wheel holds every file of the packages, and no rule of .gitignore drops one."""

import subprocess
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PACKAGES = ("jpipe", "planner", "train")


def git(*words: str) -> list[str]:
    """The lines that git prints."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def test_every_file_of_the_packages_is_in_the_wheel():
    tracked = {*git("ls-files", *PACKAGES), "jpipe_command.py"}
    assert len(tracked) > 200
    found = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert tracked - found == set()


def test_no_file_of_the_project_is_ignored():
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_what_is_ignored_is_named_from_the_root():
    """A name alone means every folder of that name, in the packages too; hatchling leaves out what git ignores."""
    rules = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line and not line.startswith("#")]
    assert [rule for rule in rules if not rule.startswith("/")] == ["__pycache__/"]


def test_every_folder_of_the_packages_is_a_package():
    for package in PACKAGES:
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
