"""The safetensors files of a folder in Hugging Face's layout. The folder may be untrusted: no pickle and no file outside it is read."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic

from jpipe import InputError
from jpipe.errors import explain, short
from jpipe.files import expanded, open_to_read, read_bytes, shown
from jpipe_lm.config.huggingface.adapter_config import ADAPTER_CONFIG
from jpipe_lm.config.huggingface.read_config import CONFIG, MOST_BYTES, inside, load_json
from jpipe_lm.hub import fetch_weights
from jpipe_train.checkpoint.sources.safetensors_file import tensors_file
from jpipe_train.checkpoint.sources.source import Spec

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MOST_INDEX = 2**26  # bytes; 100 for each tensor
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLE_HINT = (
    "jpipe reads no pickle files: reading one runs whatever code is in it. Convert it where you trust it, with transformers: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder), which writes safetensors"
)
_ADAPTER_HINT = (
    "jpipe reads no pickle files: reading one runs whatever code is in it. Convert it where you trust it, with PEFT: "
    "PeftModel.from_pretrained(model, folder).save_pretrained(new_folder), which writes safetensors"
)
_SAMPLES, _SAMPLE = 1024, 2**12  # number of samples of a file for its digest, and the bytes of each sample


@dataclass(frozen=True)
class Folder:
    """The tensors of a folder."""

    path: Path  # the path of the folder
    files: dict[str, Path]  # the safetensors files, by name
    tensors: dict[str, tuple[str, Spec]]  # the file and the spec of each tensor, by name
    described: str = CONFIG  # the name of the file that says what the tensors are

    def read(self, names: list[str]) -> dict[str, Any]:
        """Read tensors as NumPy arrays, by name."""
        arrays: dict[str, Any] = {}
        for file in dict.fromkeys(self.tensors[name][0] for name in names):
            with tensors_file(self.files[file], shown(self.files[file])) as tensors:
                arrays |= {name: tensors.read(name) for name in names if self.tensors[name][0] == file}
        return arrays

    def digest(self) -> str:
        """Hash the file `described`, all specs, and the size and samples of each file, because whole files may be very large."""
        total = hashlib.sha256(read_bytes(self.path / self.described, MOST_BYTES))
        for name, path in sorted(self.files.items()):
            size = path.stat().st_size
            total.update(f"{name} {size}".encode())
            offsets = [0] if size <= _SAMPLES * _SAMPLE else [i * (size - _SAMPLE) // (_SAMPLES - 1) for i in range(_SAMPLES)]
            with open_to_read(path) as opened:
                for offset in offsets:
                    opened.seek(offset)
                    total.update(opened.read(size if len(offsets) == 1 else _SAMPLE))
        for name, (file, spec) in sorted(self.tensors.items()):
            total.update(f"{name} {file} {spec}".encode())
        return total.hexdigest()


def is_meant(path: Path) -> bool:
    """Return whether a folder is in Hugging Face's layout rather than a run folder."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    weights = any(_WEIGHTS.fullmatch(name) or name.endswith(_PICKLES) for name in names)
    return CONFIG in names or ("checkpoints" not in names and weights)


def reject_file(path: Path) -> None:
    """Check that a file is neither a pickle nor part of a folder in Hugging Face's layout; only its name is looked at."""
    if path.suffix in _PICKLES:
        raise InputError(f"'{shown(path)}': {_PICKLE_HINT}")
    if _WEIGHTS.fullmatch(path.name) and (path.parent / CONFIG).is_file():
        raise InputError(f"'{shown(path)}': expected the folder, because {CONFIG} beside it belongs to it; give '{shown(path.parent)}'")


def reject_adapters(path: Path, where: str, instead: str) -> None:
    """Check that a folder holds a model, and not only adapters, which the key or option `instead` takes."""
    if (path / ADAPTER_CONFIG).is_file():
        raise InputError(
            f"'{shown(path)}' has an {ADAPTER_CONFIG}: it holds adapters instead of a model",
            where=where,
            change=f"give the folder of the model, and this one as {instead}",
        )


def look_into(path: Path) -> Folder:
    """Return the tensors of a folder that has a `config.json`; no array is read.

    Raise InputError if there are no safetensors files, or one is missing, cut off, or outside the folder.
    """
    fetch_weights(path)
    return _of_files(path, [WHOLE] if os.path.lexists(path / WHOLE) else _in_index(path))


def look_into_adapters(path: Path) -> Folder:
    """Return the tensors of a folder in PEFT's layout; no array is read.

    Raise InputError if there is no safetensors file, or it is cut off or outside the folder.
    """
    fetch_weights(path)
    if not os.path.lexists(path / ADAPTER_WEIGHTS):
        pickles = sorted(name for name in os.listdir(path) if name.endswith(_PICKLES))
        found = f"found {pickles[0]}; {_ADAPTER_HINT}" if pickles else "found none; give a folder such as PEFT's save_pretrained writes"
        raise InputError(f"{shown(path)}: expected {ADAPTER_WEIGHTS}, {found}")
    return _of_files(path, [ADAPTER_WEIGHTS], ADAPTER_CONFIG)


def _of_files(path: Path, names: list[str], described: str = CONFIG) -> Folder:
    files = {name: inside(path, name) for name in names}
    tensors: dict[str, tuple[str, Spec]] = {}
    for name, file in files.items():
        with tensors_file(file, shown(file)) as opened:
            for tensor, spec in opened.specs.items():
                if tensor in tensors:
                    raise InputError(
                        f"{shown(path)}: the tensor {short(tensor)} is in {tensors[tensor][0]} and in {name}; remove one of them"
                    )
                tensors[tensor] = name, spec
    return Folder(path, files, tensors, described)


class _Index(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    weight_map: Annotated[dict[str, str], pydantic.Field(min_length=1)]


def _in_index(path: Path) -> list[str]:
    """Return the names of the files that the index lists."""
    file = path / INDEX
    if not os.path.lexists(file):
        pickles = sorted(name for name in os.listdir(path) if name.endswith(_PICKLES))
        instead = (
            f"found {pickles[0]}; {_PICKLE_HINT}"
            if pickles
            else "found neither; give a folder such as transformers' save_pretrained writes"
        )
        raise InputError(f"{shown(path)}: expected {WHOLE} or {INDEX}, {instead}")
    try:
        names = sorted(set(_Index.model_validate(load_json(inside(path, INDEX), _MOST_INDEX)).weight_map.values()))
    except pydantic.ValidationError as error:
        raise explain(error, _Index, shown(file)) from None
    for name in names:
        expanded(name, shown(file))
        if name.endswith(_PICKLES):
            raise InputError(f"{shown(file)}: found {short(name)}; {_PICKLE_HINT}")
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{shown(file)}: expected names of safetensors files in this folder, found {short(name)}; correct the index")
    return names
