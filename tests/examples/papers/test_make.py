"""`python -m examples.papers.samples` writes the same data for the same seed, completely or not at all."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.papers.samples import images, make


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", make.SAMPLES)
def test_the_seed_determines_the_samples(name, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "PARTS", {"train": 4, "val": 2})
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        assert make.SAMPLES[name](tmp_path / folder, seed)
    first, second, other = (digests(tmp_path / folder) for folder in "abc")
    assert first
    assert first == second
    assert first != other


def test_images_are_shapes_by_class(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make.main(["images"]) == 0
    assert capsys.readouterr().out.startswith("samples/images: images of 8 classes (bar, circle, ")
    output = tmp_path / "samples" / "images"
    for part, number in images.PARTS.items():
        assert sorted(path.name for path in (output / part).iterdir()) == list(images.SHAPES)
        for shape in images.SHAPES:
            files = sorted((output / part / shape).iterdir())
            assert len(files) == number
            pixels = np.asarray(Image.open(files[0]))
            assert (pixels.shape, pixels.dtype) == ((48, 48, 3), np.uint8)
            assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 2  # ground, shape, the edge between
    assert len(set(digests(output).values())) == sum(images.PARTS.values()) * len(images.SHAPES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["image"], "samples: unknown data set 'image'; did you mean 'images'?"),
        (["images", "--seed", "-1"], "--seed: expected a number from 0 to 4294967295, found -1; choose one between"),
        (["images", "--out", "there"], "--out: 'there' already exists; choose another name, or remove it first"),
        (["images", "--out", "there/file/images"], "--out: cannot write"),
    ],
)
def test_an_impossible_tokenizer_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    assert make.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "file"]
