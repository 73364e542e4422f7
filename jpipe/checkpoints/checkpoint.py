"""Open a checkpoint of a run. Every reader of checkpoints begins here: resumes, warm starts, evaluations, exports and generation."""

import contextlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe.checkpoints.orbax_item import ITEM, Tree, item_specs, read_item
from jpipe.checkpoints.records import Damaged, Marker, ProcessRecord, files_in, read_marker, read_parts, read_rows, verify_files
from jpipe.files import resolved
from jpipe.runtime._snapshot import layer_of, with_optimizers


def run_folder(folder: str | Path) -> Path:
    """Return the absolute path of a run's folder. Raise InputError if it is not a path, or cannot be a local folder's, such as a URL."""
    if not isinstance(folder, str | Path):
        raise InputError(where="folder", expected="the path of a run's folder", found=type(folder).__name__)
    return resolved(str(folder), "folder")


class Checkpoint:
    """A complete checkpoint of a run, to be read.

    Its records are read when they are first needed, and then kept. Each process can read any layers without the other processes.

    Args:
        folder: the folder of the run.
        step: the number of batches that the weights have seen.

    Attributes:
        folder, step: as given.
        path: the folder of the checkpoint.

    Raises:
        Damaged: in any method or attribute that reads a file, that file is missing, cut off or changed.
        InputError: in the same places, the checkpoint has another format, or permission to read a file is missing.
    """

    def __init__(self, folder: str | Path, step: int) -> None:
        self.folder, self.step = run_folder(folder), step
        self.path = self.folder / "checkpoints" / str(step)
        self._item = self.path / ITEM
        self._is_verified = False

    @property
    def facts(self) -> Any:
        """The facts of the run that were passed to `save`."""
        return self._marker.facts

    @property
    def digest(self) -> str:
        """A hash of the whole content."""
        return self._marker.sha256

    @property
    def layers(self) -> list[str]:
        """The names of the layers."""
        return [layer for part in self._parts for layer in part.layers]

    def rows(self) -> bytes:
        """Read the rows of the run's metrics, as passed to `save`."""
        return read_rows(self.path, self._marker)

    def verify(self, *, contents: bool = True) -> None:
        """Check the size of every file and, with `contents`, its hash. After that `read` does not compare hashes again."""
        verify_files(self._item, files_in(self.path, self._parts), contents=contents)
        self.rows()
        self._is_verified |= contents

    def has_all_files(self) -> bool:
        """Return whether the checkpoint is complete and all files have the recorded sizes. The contents of large files are not read."""
        try:
            self.verify(contents=False)
        except InputError:
            return False
        return True

    def specs(self) -> dict[str, Tree]:
        """Return the shapes and dtypes of all layers, as of the arrays from `read`. No array is read, and no array's hash is compared."""
        verify_files(self._item, files_in(self.path, self._parts), contents=False)
        with _damaged(self._item):
            return with_optimizers({layer: self._specs[layer] for layer in self.layers})

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tree]:
        """Read layers after verifying the hashes of their files. Any process can have written them.

        Args:
            names: the names of the layers; None for all.

        Returns:
            `{name: nested dicts of NumPy arrays}`, in the order of `names`. Each layer includes its optimizer state, which may come from
            any replica.

        Raises:
            InputError: there is no such layer.
        """
        known = self.layers
        wanted = list(known if names is None else names)
        if unknown := [layer for layer in wanted if layer not in known]:
            raise InputError(f"{self.path}: expected the layer '{unknown[0]}', found {', '.join(known)}; is it a checkpoint of this model?")
        # The wanted layers, and the entries that other replicas have written for them.
        chosen = set(wanted)
        needed = {name for name in known if name in chosen or layer_of(name, chosen) is not None}
        parts = [part for part in self._parts if needed.intersection(part.layers)]
        verify_files(self._item, files_in(self.path, parts), contents=not self._is_verified)
        with _damaged(self._item):
            layers = read_item(self._item, {layer: self._specs[layer] for layer in known if layer in needed})
        layers = with_optimizers(layers)
        return {layer: layers[layer] for layer in wanted}

    @cached_property
    def _marker(self) -> Marker:
        return read_marker(self.path, self.step)

    @cached_property
    def _parts(self) -> list[ProcessRecord]:
        return read_parts(self.path, self._marker)

    @cached_property
    def _specs(self) -> dict[str, Tree]:
        return item_specs(self._item)


@contextlib.contextmanager
def _damaged(item: Path) -> Iterator[None]:
    """Convert every error of reading an item to `Damaged`. If an item has the right hashes and still fails, jpipe did not write it."""
    try:
        yield
    except Exception as error:
        text = (str(error).splitlines() or [""])[0].partition(" [tensorstore_spec")[0].replace(f' at local file "{item}/"', "")[:200]
        raise Damaged(item, f"is no Orbax item as jpipe writes it ({type(error).__name__}: {text})") from error
