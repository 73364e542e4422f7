"""Find the Arrow files and the splits in folders that `save_to_disk` of Hugging Face's datasets writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import read_bytes

_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_MOST_BYTES = 2**26  # the largest size of one of these files
VALIDATION = "validation", "valid", "val", "dev"
"""The names of the split for validation, in order of preference."""


def is_saved(folder: Path) -> bool:
    """Return whether a folder is a dataset, or a `DatasetDict`."""
    return (folder / _DICT).is_file() or ((folder / _STATE).is_file() and (folder / _INFO).is_file())


def splits(folder: Path, where: str) -> dict[str, Path]:
    """Return a dict from the names of splits to their folders if `folder` is a `DatasetDict`; otherwise it is empty.

    Raise InputError if the `DatasetDict` is damaged.
    """
    if not (folder / _DICT).is_file():
        return {}
    names = _read(folder / _DICT, where).get("splits")
    return {name: folder / name for name in _names(names, folder / _DICT, "splits", where)}


def files(folder: Path, where: str) -> list[Path] | None:
    """Return the Arrow files of a dataset in the order of its rows, or None if this folder is not a dataset.

    Raise InputError if it is damaged, or has a file with row indices, which old versions of datasets wrote.
    """
    if not is_saved(folder):
        return None
    state = _read(folder / _STATE, where)
    if state.get("_indices_data_files"):
        raise InputError(
            f"'{folder}' has a file of row indices, as old versions of datasets wrote it",
            where=where,
            change="load the dataset with datasets, and save it again",
        )
    listed = state.get("_data_files")
    names = [item.get("filename") if isinstance(item, dict) else item for item in listed] if isinstance(listed, list) else listed
    found = [folder / name for name in _names(names, folder / _STATE, "files", where)]
    if missing := [file for file in found if not file.is_file()]:
        raise InputError(
            where=where, expected=f"the file '{missing[0]}', which {_STATE} names", found="none", change="copy the folder again"
        )
    return found


def _names(names: Any, file: Path, what: str, where: str) -> Sequence[str]:
    """Return `names`, or raise InputError if they are not a list of entries in a folder, or lead out of a folder."""

    def is_name(name: Any) -> bool:
        return isinstance(name, str) and Path(name).parts == (name,) and name != ".." and "\0" not in name

    if not isinstance(names, list) or not all(map(is_name, names)):
        raise InputError(where=where, expected=f"names of {what} in '{file}'", found=short(names), change="save the dataset again")
    return names


def _read(file: Path, where: str) -> dict[str, Any]:
    return json_object(file, _MOST_BYTES, where, "save the dataset again")


def json_object(file: Path, most: int, where: str, change: str) -> dict[str, Any]:
    """Return the object in a JSON file of at most `most` bytes. Raise InputError if it is something else, OSError if it cannot be read."""
    try:
        values = json.loads(read_bytes(file, most))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InputError(where=where, expected=f"a JSON object in '{file}'", found="something else", change=change)
    return values
