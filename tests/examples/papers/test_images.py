"""Folders of images: the rows and their contents, and images that are refused or left out."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.papers.data import images
from examples.papers.data.image_rows import DEVIATION, MEAN, Crops
from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.data import data

CLASSES = {"cat": 12, "dog": 9, "eel": 11}
SIZE = 6


def color(name: str, number: int) -> tuple[int, int, int]:
    """Return a color that differs between images."""
    return 40 + 60 * list(CLASSES).index(name), 10 + 7 * number, 200 - 5 * number


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write images of one color each in several formats and sizes, so that all crops of an image are equal."""
    root = tmp_path_factory.mktemp("images")
    for name, count in CLASSES.items():
        (root / name / "more").mkdir(parents=True)
        for number in range(count):
            place = root / name / ("more" if number % 3 == 0 else "") / f"{number:02}.{('png', 'bmp', 'PPM')[number % 3]}"
            Image.new("RGB", (8 + number, 20 - number), color(name, number)).save(place)
    return root


def load(folder: Path | str, batch_size: int = 4, seed: int = 0, **arguments: object) -> data.Data:
    options = {"folder": str(folder), "image_size": SIZE, "validation_fraction": 0.3} | arguments
    if "validation_folder" in options:
        del options["validation_fraction"]
    return images.load(seed, batch_size, **options)


def color_of(row: np.ndarray) -> tuple[int, ...]:
    """Return the color of a row whose pixels all have the same one."""
    pixels = np.rint((row * DEVIATION + MEAN) * 255).astype(int).reshape(-1, 3)
    assert (pixels == pixels[0]).all()
    return tuple(pixels[0].tolist())


def rows_of(batches: data.Batches, indices: range) -> list[tuple[tuple[int, ...], int]]:
    rows = []
    for index in indices:
        inputs, labels = batches[index]
        assert (inputs.shape[1:], inputs.dtype, labels.dtype) == ((SIZE, SIZE, 3), np.float32, np.int32)
        rows += [(color_of(row), int(label)) for row, label in zip(inputs[0 : len(inputs)], labels[0 : len(labels)], strict=True)]
    return rows


def test_each_image_is_a_row_once_an_epoch_with_its_class(folder):
    dataset = load(folder, batch_size=1)
    everything = {(color(name, i), list(CLASSES).index(name)) for name, count in CLASSES.items() for i in range(count)}
    held_out = rows_of(dataset.validation, range(len(dataset.validation)))
    train = len(everything) - len(held_out)
    epochs = [rows_of(dataset.train, range(train * epoch, train * (epoch + 1))) for epoch in (0, 1)]
    assert 3 < len(held_out) < 20
    assert len(set(held_out)) == len(held_out)
    assert set(epochs[0]) == set(epochs[1]) == everything - set(held_out)
    assert epochs[0] != epochs[1]
    assert dataset.amount == f"{train} images for training, {len(held_out)} for validation, of 3 classes"


def test_the_held_out_files_depend_on_names_only(folder):
    parts = [rows_of(load(folder, batch_size=1, seed=seed).validation, range(4)) for seed in (0, 1)]
    assert parts[0] == parts[1]
    whole = load(folder, batch_size=1, validation_folder=str(folder))
    assert len(whole.validation) == sum(CLASSES.values())


def test_batches_are_a_pure_function_of_the_seed_and_their_number(tmp_path):
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / name / f"{i}.png")
    first, repeated, other = (load(tmp_path, batch_size=2, seed=seed) for seed in (0, 0, 1))
    later = [repeated.train[t][0][0:2] for t in (7, 3, 0)]  # as a run that resumes at step 7, or another process
    for t, batch in zip((7, 3, 0), later, strict=True):
        np.testing.assert_array_equal(first.train[t][0][0:2], batch)
        np.testing.assert_array_equal(first.train[t][0][1:2], batch[1:])
    assert not np.array_equal(first.train[0][0][0:2], other.train[0][0][0:2])
    assert first.digest() == repeated.digest()
    labels = first.train[0][1][0:2].tolist()
    crops = [first.train[t][0][i : i + 1] for t in range(60) for i in range(2) if first.train[t][1][i : i + 1].tolist() == labels[:1]]
    assert len({crop.tobytes() for crop in crops}) > 30  # of at most six images


def test_only_requested_rows_are_decoded(folder, tmp_path):
    dataset = load(folder)
    inputs, labels = dataset.train[0]
    for name in CLASSES:
        (folder / name).rename(tmp_path / name)
    try:
        assert labels[0:4].shape == (4,)  # without a file
        with pytest.raises(InputError, match=r"data.arguments.folder: cannot read '.*': No such file or directory"):
            inputs[0:1]
    finally:
        for name in CLASSES:
            (tmp_path / name).rename(folder / name)
    assert inputs[0:1].shape == (1, SIZE, SIZE, 3)


def test_training_crops_lie_inside_and_have_the_requested_share_and_aspect():
    random, crops = np.random.default_rng(0), Crops(SIZE, 0.25)
    boxes = [crops.box(400, 300, random) for _ in range(300)]
    shares = [(right - left) * (bottom - top) / (400 * 300) for left, top, right, bottom in boxes]
    ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
    assert all(0 <= left < right <= 400 and 0 <= top < bottom <= 300 for left, top, right, bottom in boxes)
    assert 0.24 < min(shares) < 0.35
    assert max(shares) > 0.8
    assert 0.74 < min(ratios) < 0.85 < 1.2 < max(ratios) < 1.35
    assert Crops(SIZE, 1.0).box(10, 1000, random) == (0, 493.5, 10, 506.5)  # where no drawn shape fits: the middle


def test_half_of_the_crops_are_mirrored_if_requested(tmp_path):
    Image.fromarray(np.repeat(np.arange(8, dtype=np.uint8)[None, :, None] * 30, 8, 0).repeat(3, 2)).save(tmp_path / "ramp.png")

    def rises(flip: bool) -> list[bool]:
        rows = [Crops(8, 1.0, flip).row(tmp_path / "ramp.png", (0, i)) for i in range(100)]
        return [bool(row[0, 0, 0] < row[0, -1, 0]) for row in rows]

    assert all(rises(False))
    assert 30 < sum(rises(True)) < 70


def test_validation_uses_the_central_crop(tmp_path):
    """The crop is seven eighths of the shorter side; each of its pixels averages a few, some of them outside the crop."""

    def row(border: int) -> np.ndarray:
        pixels = np.zeros((80, 64, 3), np.uint8)
        pixels[8 + border : 72 - border, border : 64 - border] = (0, 0, 255)
        Image.fromarray(pixels).save(tmp_path / "frame.png")
        return Crops(28, None).row(tmp_path / "frame.png", (0, 0))

    assert color_of(row(2)) == (0, 0, 255)
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        assert color_of(row(6)[corner])[2] < 10
    assert color_of(row(6)[2:-2, 2:-2]) == (0, 0, 255)


@pytest.fixture
def spoiled(tmp_path):
    """Write four images of two classes that decode, and some files that do not."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(4):
            Image.new("RGB", (9, 9), (i, i, i)).save(tmp_path / name / f"{i}.png")
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(whole, "JPEG")
    (tmp_path / "a" / "cut.jpg").write_bytes(whole.getvalue()[:900])
    (tmp_path / "a" / "empty.png").write_bytes(b"")
    (tmp_path / "b" / "text.png").write_text("no image")
    (tmp_path / "b" / "notes.txt").write_text("not looked at")
    return tmp_path


def test_images_that_do_not_decode_are_left_out_on_request(spoiled):
    dataset = load(spoiled, batch_size=1, validation_folder=str(spoiled), skip_broken=True)
    assert len(dataset.validation) == 8
    rows_of(dataset.validation, range(8))
    notes, broken = dataset.remarks[0], dataset.remarks[-1]
    assert notes == f"1 file left out whose name is not that of an image, the first is '{spoiled}/b/notes.txt'"
    assert broken.startswith("6 images left out that cannot be decoded: ")  # three in each part
    for file, reason in (
        ("a/cut.jpg", "image file is truncated"),
        ("a/empty.png", "the file is empty"),
        ("b/text.png", "it is no image of"),
    ):
        assert f"'{spoiled}/{file}' ({reason}" in broken


@pytest.mark.parametrize(("file", "reason"), [("a/cut.jpg", "image file is truncated"), ("a/empty.png", "the file is empty")])
def test_by_default_the_first_broken_image_is_named(spoiled, file, reason):
    for other in ("a/cut.jpg", "a/empty.png", "b/text.png"):
        if other != file:
            (spoiled / other).unlink()
    dataset = load(spoiled, batch_size=1, validation_folder=str(spoiled))
    message = f"data.arguments.folder: cannot decode '{spoiled / file}': {reason}"
    with pytest.raises(
        InputError, match=re.escape(message) + r".*; remove it, or leave out such images with data.arguments.skip_broken: true"
    ):
        rows_of(dataset.validation, range(len(dataset.validation)))


def test_folders_without_classes_of_images_are_refused(tmp_path):
    def refused(message: str, **arguments: object) -> None:
        with pytest.raises(InputError, match=re.escape(message)):
            load(tmp_path / "there", batch_size=2, **arguments)

    images_folder = tmp_path / "there"
    refused(f"data.arguments.folder: '{images_folder}' does not exist; give a folder that holds a folder of images for each class")
    images_folder.mkdir()
    refused(f"expected a folder for each class in '{images_folder}', it is empty")
    Image.new("RGB", (9, 9)).save(images_folder / "0.png")
    refused("found none among 1 files")
    (images_folder / "a").mkdir()
    refused(f"expected at least two classes in '{images_folder}', found one folder, 'a'")
    (images_folder / "b").mkdir()
    refused(f"expected an image in each class, found none in '{images_folder}/a'")
    for name in ("a", "b"):
        Image.new("RGB", (9, 9)).save(images_folder / name / "0.png")
    refused("expected at least 2 images for training and for validation (train.batch_size), found 1 and 1 in")
    refused(f"data.arguments.validation_folder: '{images_folder}/0.png' is a file", validation_folder=str(images_folder / "0.png"))
    other = tmp_path / "other"
    (other / "c").mkdir(parents=True)
    refused("expected classes that data.arguments.folder has, too, found 1 others", validation_folder=str(other))


def test_shapes_are_known_without_a_folder():
    arguments = {"folder": "nowhere", "image_size": 64}
    model = {"target": "examples.papers.models.vgg:alexnet", "arguments": {"image_size": 64}}
    config = Config.model_validate({"model": model, "data": {"target": "examples.papers.data.images:load", "arguments": arguments}})
    inputs, labels = data.unread(config).train[0]
    assert (inputs.shape, inputs.dtype, labels.shape, labels.dtype) == ((32, 64, 64, 3), np.float32, (32,), np.int32)
