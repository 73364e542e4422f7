"""Images as arrays: decoded on reading, cropped and flipped at random for training, cropped in the middle for evaluation, normalized.

The letters in the shapes: s pixels per side.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Float32
from PIL import Image, UnidentifiedImageError

from jpipe import InputError
from jpipe.files import open_to_read

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
"""Of the channels red, green and blue of ImageNet, from 0 to 1; batches have the mean 0 and the deviation 1."""

FOLDER = "data.arguments.folder"
"""The key that names images, for messages."""

_SHARE_SEEN = 0.875  # of the shorter side in evaluation: 224 of 256 pixels
_TRIES = 10  # to find a crop of a drawn shape that lies inside
_LONGEST = 4 / 3  # side of a crop, relative to the other

Box = tuple[float, float, float, float]


class _BrokenError(Exception):
    """An image cannot be decoded."""


@dataclass(frozen=True)
class Crops:
    """How an image becomes a row.

    Attributes:
        size: s.
        smallest: share of the image that a random crop has at least; None: the middle of the image, for evaluation.
        flip: whether half of the crops are mirrored.
    """

    size: int
    smallest: float | None
    flip: bool = False

    def box(self, width: int, height: int, rng: np.random.Generator | None) -> Box:
        """Return left, top, right and bottom of the pixels that are resized to s × s."""
        if self.smallest is None or rng is None:
            side = _SHARE_SEEN * min(width, height)
            return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2
        for _ in range(_TRIES):
            area = width * height * rng.uniform(self.smallest, 1.0)
            ratio = math.exp(rng.uniform(-math.log(_LONGEST), math.log(_LONGEST)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
                return float(left), float(top), float(left + w), float(top + h)
        w, h = min(width, round(height * _LONGEST)), min(height, round(width * _LONGEST))
        return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2

    def row(self, file: Path, seed: tuple[int, int]) -> Float32[np.ndarray, "s s 3"]:
        """Read the image of a file as a row, which depends only on the file and the seed.

        Raises:
            InputError: it cannot be decoded.
        """
        try:
            image = _decoded(file)
        except _BrokenError as error:
            raise InputError(
                f"{FOLDER}: cannot decode '{file}': {error}; remove it, or leave out such images with data.arguments.skip_broken: true"
            ) from None
        rng = None if self.smallest is None else np.random.default_rng(seed)
        box = self.box(*image.size, rng)
        pixels = np.asarray(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box), np.float32)
        if rng is not None and self.flip and rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        return (pixels / np.float32(255) - MEAN) / DEVIATION


class Rows:
    """Rows of images: row i has an image, decoded on request, and the number of its class.

    Args:
        file: gives the path of each image.
        labels: the class of each.
        crops: how rows are made.
        seed: of the order and of the crops.
        epochs: again and again, each time in another order and with other crops.
    """

    def __init__(self, file: Callable[[int], Path], labels: np.ndarray, crops: Crops, seed: int, *, epochs: bool):
        self._file, self._labels, self._crops, self._seed = file, labels, crops, seed
        permutation = grain.MapDataset.range(len(labels)).shuffle(seed=seed)
        self._permutation = permutation.repeat() if epochs and len(labels) else permutation

    def __len__(self) -> int:
        return len(self._permutation)

    def __getitem__(self, index: int) -> tuple[Callable[[], np.ndarray], np.int32]:
        number = int(self._permutation[index])
        return partial(self._crops.row, self._file(number), (self._seed, index)), np.int32(self._labels[number])


def row_spec(size: int) -> tuple[Any, Any]:
    """Return the shapes and dtypes of a row."""
    return jax.ShapeDtypeStruct((size, size, 3), np.dtype(np.float32)), jax.ShapeDtypeStruct((), np.dtype(np.int32))


def reason_not_to_decode(file: Path) -> str:
    """Return why an image cannot be decoded, or "" if it can.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        _decoded(file)
    except _BrokenError as error:
        return str(error)
    return ""


def _decoded(file: Path) -> Image.Image:
    """Decode all pixels of an image, with three channels.

    Raises:
        _BrokenError: they cannot be decoded.
        InputError: the file cannot be read.
    """
    try:
        with open_to_read(file) as opened, Image.open(opened) as image:  # of an open file Pillow makes no memory map
            return image.convert("RGB")
    except Exception as error:  # of many kinds: a decoder raises what it stumbles over
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{FOLDER}: cannot read '{file}': {error.strerror}; give files that can be read") from None
        if file.stat().st_size == 0:
            raise _BrokenError("the file is empty") from None
        unknown = isinstance(error, UnidentifiedImageError)
        raise _BrokenError("it is no image of a known kind" if unknown else (str(error) or type(error).__name__)) from None
