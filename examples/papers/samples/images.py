"""Generate a data set of images: simple bright shapes on a dark ground, one class each, at any place and size, slightly rotated."""

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import Image, ImageDraw

from jpipe.files import create

SIZE = 48  # pixels per side
PARTS = {"train": 200, "val": 20}  # images of each class
_FINER = 4  # pixels are drawn so much finer and then averaged, so that edges are smooth
_TURN = math.radians(20)  # at most, in either direction: small models learn shapes in any direction too late

Corners = list[tuple[float, float]]


def _polygon(count: int, inner: float = 1.0) -> Corners:
    """Return corners on a circle of radius 1, every second one on a circle of radius `inner`."""
    angles = (2 * math.pi * i / count for i in range(count))
    radii = (1.0, inner)
    return [(radii[i % 2] * math.cos(angle), radii[i % 2] * math.sin(angle)) for i, angle in enumerate(angles)]


_ARM = 0.35  # half of the width of a cross
_CROSS = [(_ARM, _ARM), (1, _ARM), (1, -_ARM), (_ARM, -_ARM), (_ARM, -1), (-_ARM, -1)]

SHAPES: Mapping[str, Corners] = MappingProxyType(
    {
        "bar": [(1, 0.25), (1, -0.25), (-1, -0.25), (-1, 0.25)],
        "circle": _polygon(64),
        "cross": [*_CROSS, *((-x, -y) for x, y in _CROSS)],
        "hexagon": _polygon(6),
        "moon": [*_polygon(64)[8:57], *((0.55 + 0.75 * x, 0.75 * y) for x, y in reversed(_polygon(64)[10:55]))],
        "square": _polygon(4),
        "star": _polygon(10, 0.4),
        "triangle": _polygon(3),
    }
)
"""The corners of each class, within a circle of radius 1."""


def make(folder: Path, seed: int) -> str:
    """Write `train/CLASS/NUMBER.png` and `val/CLASS/NUMBER.png` into an empty folder; the same seed makes the same images.

    Returns:
        A description of what was written.
    """
    first = 0
    for part, number in PARTS.items():
        for which, (name, corners) in enumerate(SHAPES.items()):
            (folder / part / name).mkdir(parents=True)
            for i in range(number):
                rng = np.random.default_rng((seed, which, first + i))
                with create(folder / part / name / f"{i:03d}.png") as file:
                    file.write(_png(corners, rng.uniform))
        first += number
    counts = " and ".join(f"{number * len(SHAPES)} in {part}" for part, number in PARTS.items())
    return f"images of {len(SHAPES)} classes ({', '.join(SHAPES)}), {counts}"


def _png(corners: Corners, uniform: Callable[..., np.ndarray]) -> bytes:
    """Draw one shape on a plain ground, in colors that differ clearly, as PNG."""
    ground, color = uniform(0, 128, 3), uniform(128, 256, 3)
    while (color - ground).sum() < 200:
        color = uniform(128, 256, 3)
    size = SIZE * _FINER
    radius, angle = uniform(0.25, 0.45) * size, uniform(-_TURN, _TURN)
    middle = uniform(radius, size - radius, 2)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) * radius
    image = Image.new("RGB", (size, size), _rgb(ground))
    ImageDraw.Draw(image).polygon([tuple(corner) for corner in np.array(corners) @ turn.T + middle], fill=_rgb(color))
    file = io.BytesIO()
    image.resize((SIZE, SIZE), Image.Resampling.BOX).save(file, "PNG")
    return file.getvalue()


def _rgb(color: np.ndarray) -> tuple[int, int, int]:
    red, green, blue = color.astype(int).tolist()
    return red, green, blue
