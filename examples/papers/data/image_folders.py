"""Folders of images, one folder per class, listed in a fixed order and split into training and validation images."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from examples.papers.data.image_rows import FOLDER, reason_not_to_decode
from jpipe import InputError
from jpipe.files import expanded, open_to_read
from jpipe_train.console import interrupt
from jpipe_train.console.terminal import count
from jpipe_train.data import sources
from jpipe_train.data.rows import THREADS

ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""Of the names of images, in lower or upper case."""

_SHAPE = "give a folder that holds a folder of images for each class"
_SAMPLED = 16  # files whose bytes are compared between processes
_NAMED = 5  # of the images that do not decode


@dataclass(frozen=True)
class Images:
    """A set of images with their classes.

    Attributes:
        root: the folder.
        names: of the files, below it; each begins with its class.
        labels: the number of the class of each.
        classes: their names.
    """

    root: Path
    names: tuple[str, ...]
    labels: Int32[np.ndarray, " n"]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def file(self, number: int) -> Path:
        """Return the path of an image."""
        return self.root / self.names[number]

    def some(self, numbers: Sequence[int]) -> "Images":
        """Return a subset of the images."""
        return replace(self, names=tuple(self.names[i] for i in numbers), labels=self.labels[np.asarray(numbers, np.int64)])

    def digest(self) -> str:
        """Hash all names, and the bytes of some files."""
        hasher = hashlib.sha256("\0".join(self.names).encode(errors="surrogateescape"))
        with sources.readable(FOLDER):
            for number in range(0, len(self), max(len(self) // _SAMPLED, 1)):
                with open_to_read(self.file(number)) as file:
                    hasher.update(hashlib.file_digest(file, "sha256").digest())
        return hasher.hexdigest()


@dataclass(frozen=True)
class Split:
    """Images for training and for validation.

    Attributes:
        train: to learn from.
        validation: images that are held out.
        source: a phrase that says where they come from.
        remarks: lines that say what was left out.
    """

    train: Images
    validation: Images
    source: str
    remarks: tuple[str, ...] = ()

    def digest(self) -> str:
        """Hash both parts."""
        return self.train.digest() + self.validation.digest()


def read(folder: str, validation_folder: str | None, validation_fraction: float, skip_broken: bool) -> Split:
    """List the images of a folder, and split off those for validation.

    Args:
        folder: holds a folder of images for each class.
        validation_folder: the same for validation; None: a share of the files of `folder`.
        validation_fraction: that share.
        skip_broken: decode all images once, to leave out those that do not decode.

    Raises:
        InputError: a folder is missing, holds no or one class, or a class without an image; a class is only in the folder for validation.
    """
    images, remarks = find(folder, FOLDER, skip=skip_broken)
    if validation_folder is not None:
        held_out, more = find(validation_folder, "data.arguments.validation_folder", images.classes, skip=skip_broken)
        parts, remarks = [images, held_out], [*remarks, *more]
    else:
        names = sources.validation_names(images.names, validation_fraction)
        apart = [[i for i, name in enumerate(images.names) if (name in names) == is_held_out] for is_held_out in (False, True)]
        parts = [images.some(numbers) for numbers in apart]
    if skip_broken:
        parts, more = _without_broken(parts)
        remarks += more
    return Split(parts[0], parts[1], f"'{folder}'", tuple(remarks))


def find(path: str, where: str, classes: tuple[str, ...] | None = None, *, skip: bool = False) -> tuple[Images, list[str]]:
    """List the images of a folder.

    Args:
        path: the folder.
        where: the key that names it, for messages.
        classes: the allowed classes; None: all folders, in alphabetical order, at least two.
        skip: leave out what has the name of an image and is no file, such as a FIFO or a link that leads nowhere; else raise an error for
        it.

    Returns:
        The images, and a line for each kind of file that was left out.

    Raises:
        InputError: the folder does not exist, or lacks classes or images.
    """
    root = expanded(path, where)
    if not root.is_dir():
        state = f"'{path}' is a file" if root.exists() else f"'{path}' does not exist"
        raise InputError(f"{where}: {state}; {_SHAPE}")
    with sources.readable(where):
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
        names_of_classes = tuple(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        _check_folders(path, where, names_of_classes, classes, len(entries))
        names: list[str] = []
        labels: list[int] = []
        not_images: list[str] = []
        special: list[str] = []
        for name in names_of_classes:
            files = _files(root, name)
            if files.special and not skip:
                raise InputError(
                    f"{where}: expected a file, found something else as '{root / files.special[0]}', such as a FIFO or a link that leads "
                    "nowhere; remove it, or leave out such images with data.arguments.skip_broken: true"
                )
            if not files.images:
                raise InputError(f"{where}: expected an image in each class, found none in '{root / name}'; fill the folder, or remove it")
            names += files.images
            not_images += files.not_images
            special += files.special
            labels += [(classes or names_of_classes).index(name)] * len(files.images)
    remarks = []
    if not_images:
        remarks = [f"{count(len(not_images), 'file')} left out whose name is not that of an image, the first is '{root / not_images[0]}'"]
    if special:
        remarks.append(f"{count(len(special), 'image')} left out that is no regular file, the first is '{root / special[0]}'")
    return Images(root, tuple(names), np.asarray(labels, np.int32), classes or names_of_classes), remarks


def _check_folders(path: str, where: str, names: tuple[str, ...], classes: tuple[str, ...] | None, entries: int) -> None:
    if not names:
        what = "it is empty" if not entries else f"found none among {entries} files"
        raise InputError(f"{where}: expected a folder for each class in '{path}', {what}; {_SHAPE}")
    if classes is None and len(names) == 1:
        raise InputError(f"{where}: expected at least two classes in '{path}', found one folder, '{names[0]}'; {_SHAPE}")
    if classes is not None and (unknown := sorted(set(names) - set(classes))):
        raise InputError(
            f"{where}: expected classes that {FOLDER} has, too, found {len(unknown)} others in '{path}', the first is '{unknown[0]}'; "
            "remove them, or add them there"
        )


class _ClassFiles(NamedTuple):
    """The files of a class: images, files with other names, and entries that are named like images but are no regular files."""

    images: list[str]
    not_images: list[str]
    special: list[str]


def _files(root: Path, name: str) -> _ClassFiles:
    """List the files of a class, without hidden ones and links to folders."""
    files = _ClassFiles([], [], [])
    folders = [root / name]
    while folders:
        interrupt.check()
        entries = sorted((entry for entry in os.scandir(folders.pop()) if not entry.name.startswith(".")), key=lambda entry: entry.name)
        for entry in (entry for entry in entries if not entry.is_dir()):
            path = Path(entry.path)
            is_image = path.suffix.lower() in ENDINGS
            place = files.not_images if not is_image else files.images if entry.is_file() else files.special
            place.append(path.relative_to(root).as_posix())
        folders += [Path(entry.path) for entry in reversed(entries) if entry.is_dir(follow_symlinks=False)]
    return files


def _without_broken(parts: Sequence[Images]) -> tuple[list[Images], list[str]]:
    """Leave out images that do not decode.

    Returns:
        The remaining images, and a line that counts the remaining ones and names the first.
    """
    whole: list[Images] = []
    broken: list[str] = []
    for part in parts:
        reasons = list(THREADS.map(reason_not_to_decode, map(part.file, range(len(part)))))
        broken += [f"'{part.file(i)}' ({reason})" for i, reason in enumerate(reasons) if reason]
        whole.append(part.some([i for i, reason in enumerate(reasons) if not reason]))
    if not broken:
        return whole, []
    more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    return whole, [f"{count(len(broken), 'image')} left out that cannot be decoded: {', '.join(broken[:_NAMED])}{more}"]
