"""The safetensors files of a folder in Hugging Face's layout, whoever made it: nothing outside the folder is read, and no pickle, ever."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import pydantic
from safetensors import SafetensorError

from jpipe import InputError
from jpipe.errors import explain, short
from jpipe.files import expanded, open_to_read, read_bytes, shown
from jpipe_train.checkpoint.safetensors_file import TensorsFile, tensors_file
from jpipe_train.checkpoint.source import Spec
from jpipe_train.config.huggingface import CONFIG, MOST_BYTES, load_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_INDEX = 2**26  # bytes; 100 for each tensor
_MOST_HEADER = 10**8  # bytes, as in the safetensors library
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLE_HINT = (
    "jpipe reads no pickle files: reading one runs whatever code is in it. Convert it where you trust it, with transformers: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder), which writes safetensors"
)
_SAMPLES, _SAMPLE = 1024, 2**12  # so many pieces of so many bytes of each file tell it from another one


@dataclass(frozen=True)
class Folder:
    """The tensors of a folder.

    Attributes:
        path: of the folder.
        files: the safetensors files, by name.
        tensors: by name the file and the spec of each.
    """

    path: Path
    files: dict[str, Path]
    tensors: dict[str, tuple[str, Spec]]

    def read(self, names: list[str]) -> dict[str, Any]:
        """These tensors as NumPy arrays."""
        found: dict[str, Any] = {}
        for file in dict.fromkeys(self.tensors[name][0] for name in names):
            with _opened(self.files[file]) as tensors:
                found |= {name: tensors.read(name) for name in names if self.tensors[name][0] == file}
        return found

    def digest(self) -> str:
        """A hash of `config.json`, of the size and the header of each file and of samples of what is in it: the whole may be very large."""
        total = hashlib.sha256(read_bytes(self.path / CONFIG, MOST_BYTES))
        for name, path in sorted(self.files.items()):
            size = path.stat().st_size
            total.update(f"{name} {size}".encode())
            places = [0] if size <= _SAMPLES * _SAMPLE else [i * (size - _SAMPLE) // (_SAMPLES - 1) for i in range(_SAMPLES)]
            with open_to_read(path) as opened:
                for place in places:
                    opened.seek(place)
                    total.update(opened.read(size if len(places) == 1 else _SAMPLE))
        for name, (file, spec) in sorted(self.tensors.items()):
            total.update(f"{name} {file} {spec}".encode())
        return total.hexdigest()


def is_meant(path: Path) -> bool:
    """Whether the folder is meant to be one of Hugging Face's layout, not the folder of a run."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    weights = any(_WEIGHTS.fullmatch(name) or name.endswith(_PICKLES) for name in names)
    return CONFIG in names or ("checkpoints" not in names and weights)


def refuse_file(path: Path) -> None:
    """Refuse a file that is a pickle, or one of a folder that is meant as a whole, by its name.

    Raises:
        InputError: it is one.
    """
    if path.suffix in _PICKLES:
        raise InputError(f"'{shown(path)}': {_PICKLE_HINT}")
    if _WEIGHTS.fullmatch(path.name) and (path.parent / CONFIG).is_file():
        raise InputError(f"'{shown(path)}': expected the folder, because {CONFIG} beside it belongs to it; give '{shown(path.parent)}'")


def look_into(path: Path) -> Folder:
    """What is in a folder that has a `config.json`. No array is read.

    Raises:
        InputError: no safetensors files; a file that is missing, cut off, or outside the folder.
    """
    names = [WHOLE] if os.path.lexists(path / WHOLE) else _in_index(path)
    files = {name: _inside(path, name) for name in names}
    tensors: dict[str, tuple[str, Spec]] = {}
    for name, file in files.items():
        with _opened(file) as opened:
            for tensor, spec in opened.specs.items():
                if tensor in tensors:
                    raise InputError(
                        f"{shown(path)}: the tensor {short(tensor)} is in {tensors[tensor][0]} and in {name}; remove one of them"
                    )
                tensors[tensor] = name, spec
    return Folder(path, files, tensors)


class _Index(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    weight_map: Annotated[dict[str, str], pydantic.Field(min_length=1)]


def _in_index(path: Path) -> list[str]:
    """The names of the files that the index lists."""
    file = path / INDEX
    if not os.path.lexists(file):
        pickles = sorted(name for name in os.listdir(path) if name.endswith(_PICKLES))
        found = (
            f"found {pickles[0]}; {_PICKLE_HINT}"
            if pickles
            else "found neither; give a folder such as transformers' save_pretrained writes"
        )
        raise InputError(f"{shown(path)}: expected {WHOLE} or {INDEX}, {found}")
    try:
        names = sorted(set(_Index.model_validate(load_json(_inside(path, INDEX), _MOST_INDEX)).weight_map.values()))
    except pydantic.ValidationError as error:
        raise explain(error, _Index, shown(file)) from None
    for name in names:
        expanded(name, shown(file))
        if name.endswith(_PICKLES):
            raise InputError(f"{shown(file)}: found {short(name)}; {_PICKLE_HINT}")
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{shown(file)}: expected names of safetensors files in this folder, found {short(name)}; correct the index")
    return names


def _inside(folder: Path, name: str) -> Path:
    """The file of that name, after links. They may lead to the blobs beside the snapshot of a download, and else not out of the folder."""
    path = folder / name
    try:
        found = path.resolve(strict=True)
    except FileNotFoundError:
        raise InputError(f"{shown(path)}: expected a file, found none; download it again, all of it") from None
    except (OSError, RuntimeError) as error:
        raise InputError(f"{shown(path)}: cannot find it: {getattr(error, 'strerror', None) or error}") from None
    allowed = [folder.resolve()]
    if allowed[0].parent.name == "snapshots":  # models--owner--name/snapshots/REVISION links to models--owner--name/blobs
        allowed.append(allowed[0].parent.parent / "blobs")
    if not any(found.is_relative_to(place) for place in allowed):
        raise InputError(
            f"{shown(path)}: expected a file inside the folder, found a link out of it, to {found}; put the file there instead"
        )
    if not found.is_file():
        raise InputError(f"{shown(path)}: expected a regular file, found none; download it again")
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TensorsFile]:
    try:
        with tensors_file(path) as file:
            yield file
    except (OSError, SafetensorError) as error:
        said = str(error)
    else:
        return
    _refuse(path, said)


def _refuse(path: Path, said: str) -> NoReturn:
    """Say what is wrong with a file that the safetensors library refuses."""
    where, hint = shown(path), "download it again"
    with contextlib.suppress(OSError), open_to_read(path) as file:
        start, size = file.read(8), path.stat().st_size
        if start == b"version ":
            raise InputError(f"{where}: expected a safetensors file, found a pointer of Git LFS; fetch the file itself, with git lfs pull")
        header = int.from_bytes(start, "little")
        end = 8 + header
        if len(start) == 8 and header <= _MOST_HEADER:
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
                parts = json.loads(file.read(header))
                end += max(int(part["data_offsets"][1]) for name, part in parts.items() if name != "__metadata__")
            if size < end:
                least = "at least " if size < 8 + header else ""
                raise InputError(f"{where}: expected {least}{end:,} bytes, as its header says, found {size:,}: it is cut off; {hint}")
    raise InputError(f"{where}: expected a safetensors file, found: {said}; {hint}")
