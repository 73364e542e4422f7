"""The folders of the packages under test, by import name."""

import pathlib

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = {
    "jpipe": ROOT / "jpipe",
    "jpipe_planner": ROOT / "planner" / "jpipe_planner",
    "jpipe_train": ROOT / "train" / "jpipe_train",
    "jpipe_lm": ROOT / "train" / "jpipe_lm",
}


def module_name(path: pathlib.Path) -> str:
    """Return the import name of a module of one of the packages."""
    folder = next(folder for folder in PACKAGES.values() if path.is_relative_to(folder))
    return ".".join(path.relative_to(folder.parent).with_suffix("").parts)
