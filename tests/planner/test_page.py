"""The page about the planner names each of its files once, and is short."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "planner.md").read_text(encoding="utf-8")
PLANNER = ROOT / "planner" / "jpipe_planner"


def test_each_file_is_named_once():
    files = [path.relative_to(PLANNER).as_posix() for path in PLANNER.rglob("*.py") if path.name != "__init__.py"]
    assert {name: PAGE.count(f"`{name}`") for name in files} == dict.fromkeys(files, 1)


def test_it_is_short():
    assert len(PAGE.split()) <= 1500
