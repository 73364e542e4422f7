"""Files that are not regular, damaged, or changed while they are read: a message, no hang and no signal."""

import contextlib
import os
import random
import re
import socket
import zipfile

import numpy as np
import pytest
from PIL import Image

from examples.papers.data import captions, image_rows, images, npz_file
from jpipe import InputError
from jpipe_lm.data import splits, texts
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.document_files import Files
from jpipe_lm.data.documents import Documents, Shard
from jpipe_lm.data.files import token_files
from jpipe_train.config.config import Config
from jpipe_train.data import data, sources
from jpipe_train.data.files.file_array import FileArray
from tests.lm.data.conftest import quiet, whole
from tests.lm.data.prepared import prepare_files

SPECIAL = {"fifo": os.mkfifo, "folder": os.mkdir, "link": lambda path: os.symlink("nowhere", path)}


@pytest.fixture(params=[*SPECIAL, "device", "socket"])
def special(request, tmp_path):
    """Make something that is no regular file at a path."""

    def make(path):
        if request.param == "device":
            path.symlink_to("/dev/zero")
        elif request.param == "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        else:
            SPECIAL[request.param](path)

    return make


def test_no_reader_waits_for_what_is_no_regular_file(special, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = type(tmp_path)("special")
    special(path)
    readers = {
        "text": lambda: list(texts.pieces(["a"], [path], "text", 0.0, texts.Keys(), "data.path")),
        "half of a text": lambda: list(texts.pieces(["a"], [path], "text", 0.5, texts.Keys(), "data.path")),
        "JSON lines": lambda: list(texts.pieces(["a"], [path], "prompts", 0.0, texts.Keys(), "data.path")),
        "guess": lambda: sources.guess(path),
        "tokenizer": lambda: tokenizers.load(path, "data.tokenizer"),
        "numbers": lambda: FileArray(path, np.dtype(np.uint8), size=1),
        "npz": lambda: npz_file.header(path, "features", "data.arguments.folder"),
        "bytes": lambda: splits.read_bytes(str(path), 0.5),
        "image": lambda: image_rows.reason_not_to_decode(path),
    }
    for read in readers.values():
        with pytest.raises((OSError, InputError)):
            read()


def folder_of_images(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (9, 9), (i, i, i)).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


def test_a_false_image_is_reported_before_the_first_step(tmp_path):
    folder = folder_of_images(tmp_path)
    os.mkfifo(folder / "b" / "3.png")
    (folder / "a" / "4.png").symlink_to("nowhere")
    arguments = {"folder": str(folder), "image_size": 4}
    message = rf"data\.arguments\.folder: expected a file, found something else as '{folder}/a/4\.png', such as a FIFO or a link that leads"
    with pytest.raises(InputError, match=message):
        images.load(0, 1, **arguments)
    dataset = images.load(0, 1, **arguments, skip_broken=True)
    assert len(dataset.validation) >= 1
    assert dataset.remarks == (f"2 images left out that is no regular file, the first is '{folder}/a/4.png'",)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the content with some bytes changed and, at random, its end cut off or a part repeated."""
    changed = bytearray(content)
    kind = chance.randrange(3)
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    if kind == 1:
        del changed[chance.randrange(len(changed)) :]
    elif kind == 2:
        at = chance.randrange(len(changed))
        changed[at:at] = changed[at : at + chance.randrange(60)]
    return bytes(changed)


SIZES = captions.Sizes(frames=4, words=4, features=5)


def write_features(path, compression: int = zipfile.ZIP_STORED) -> bytes:
    np.savez(path, features=np.arange(15, dtype=np.float16).reshape(3, 5))
    if compression != zipfile.ZIP_STORED:
        with zipfile.ZipFile(path) as archive:
            content = archive.read("features.npy")
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("features.npy", content)
    return path.read_bytes()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of NumPy, about headers of Python 2
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_any_damage_in_features_is_reported(compression, tmp_path):
    path, chance, messages = tmp_path / "video.npz", random.Random(compression), set()
    content = write_features(path, compression)
    np.testing.assert_array_equal(captions.features_of(path, SIZES)[:3], np.arange(15).reshape(3, 5))
    for _ in range(150):
        path.write_bytes(damaged(content, chance))
        with contextlib.suppress(InputError):
            captions.features_of(path, SIZES)
            continue
        with pytest.raises(InputError, match=rf"^[^\n]*'{path}': [^\n]+$") as caught:
            captions.features_of(path, SIZES)
        messages.add(str(caught.value).partition("': ")[2][:12])
    assert len(messages) > 3


def spoiled(path, flag: tuple[int, int] = (0, 0), header: str = "") -> None:
    """Write features with a bit set in both headers of the archive, or with another header of the array."""
    if header:
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("features.npy", content)
        return
    content = bytearray(write_features(path, zipfile.ZIP_DEFLATED))
    for magic, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(magic) + at + flag[0]] = flag[1]
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flag": (0, 1)}, "cannot read '{}': File .* is encrypted, password required"),  # RuntimeError
        ({"flag": (2, 93)}, "cannot read '{}': That compression method is not supported"),  # NotImplementedError
        ({"header": "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5"}, "cannot read '{}': "),  # TokenError
        ({"header": "{" * 5000}, "cannot read '{}': "),  # MemoryError of the parser
        (
            {"header": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**9}, 5), }}\n"},
            "expected float features of 1 to 1,000,000 f",
        ),
        ({"header": "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 5), }\n"}, "cannot read '{}': expected sizes of 0 or more"),
        ({"header": "{'descr': '<f4', 'fortran_order': False, 'shape': (900000, 5), }\n"}, "cannot read '{}': expected 18,000,000 bytes"),
        ({"header": "{'descr': '|O', 'fortran_order': False, 'shape': (3, 5), }\n"}, "expected float features"),
    ],
    ids=["encrypted", "method", "tokens", "brackets", "many", "negative", "short", "objects"],
)
def test_features_with_false_headers_are_reported(changes, message, tmp_path):
    path = tmp_path / "video.npz"
    spoiled(path, **changes)
    with pytest.raises(InputError, match=message.format(re.escape(str(path)))):
        captions.features_of(path, SIZES)


def test_tokens_that_are_cut_off_while_they_are_read_are_reported(documents, tokenizer, tmp_path):
    """A memory map would end this process with SIGBUS."""
    prepare_files(Files([str(documents)]), tokenizer, str(tmp_path / "tokens"), quiet(), 0.3)
    folder, index = token_files.read_index(str(tmp_path / "tokens"), "data.path")
    reader = token_files.documents(folder, index, index.train)
    reader.read(0, 8)
    reader.begins(0, 8)
    for name in ("train-00000.bin", "train-00000.ends"):
        os.truncate(folder / name, 4)
    for read, name in ((reader.read, "train-00000.bin"), (reader.begins, "train-00000.ends")):
        message = rf"data: expected at least .* bytes in '{folder / name}', found 4: the file was cut off during the run; copy it again"
        with pytest.raises(InputError, match=message):
            read(0, reader.size)


def test_document_ends_in_a_file_equal_those_in_memory(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 4, 3000)
    ends = np.cumsum(lengths).astype("<u8")
    (tmp_path / "ends").write_bytes(b"skipped!" + ends.tobytes())
    on_disk = FileArray(tmp_path / "ends", ends.dtype, 8)
    assert on_disk.size == len(on_disk) == ends.size
    tokens = np.zeros(int(ends[-1]), np.uint16)
    actual, expected = (Documents([Shard("s", tokens.size, lambda: tokens, lambda each=each: each)], 9) for each in (on_disk, ends))
    starts = np.zeros(tokens.size, bool)
    starts[np.concatenate([[0], ends[:-1].astype(int)])] = True
    for start in range(0, tokens.size - 60, 501):
        np.testing.assert_array_equal(actual.begins(start, start + 60), starts[start : start + 60])
        assert actual.number(start) == expected.number(start) == (0, int(starts[: start + 1].sum()) - 1)
    assert actual.digest() == expected.digest()


@pytest.mark.parametrize("files", [1, 3])
def test_a_large_text_is_read_on_demand(files, tiny, tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(files):
        (folder / f"{i}.txt").write_bytes(random.Random(i).randbytes(5000 + i))
    path = str(folder) if files > 1 else str(folder / "0.txt")
    config = Config.model_validate(tiny | {"data": {"path": path, "validation_fraction": 0.4, "boundaries": "keep"}})
    in_memory = data.load(config)
    expected = [whole(in_memory.train[t]) for t in range(3)] + [whole(in_memory.validation[0])]
    monkeypatch.setattr(splits, "_MOST_IN_MEMORY", 100)
    lazy = data.load(config)
    assert lazy.amount == in_memory.amount
    actual = [whole(lazy.train[t]) for t in range(3)] + [whole(lazy.validation[0])]
    for one, other in zip(actual, expected, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    digest = lazy.digest()
    assert data.load(config).digest() == digest
    with open(folder / "0.txt", "r+b") as changing:
        changing.seek(2000)
        changing.write(b"changed")
    assert data.load(config).digest() != digest


def test_a_file_larger_than_memory_is_not_read_at_once(tiny, tmp_path):
    with open(tmp_path / "large.txt", "wb") as file:
        file.truncate(2**42)  # no blocks on the disk
    dataset = data.load(Config.model_validate(tiny | {"data": {"path": str(tmp_path / "large.txt")}}))
    assert not dataset.train[10**6][0][:1].any()


def test_too_little_memory_is_reported(tiny, tmp_path, monkeypatch):
    def no_memory(*_):
        raise MemoryError

    (tmp_path / "a.txt").write_text("some text\n" * 100)
    monkeypatch.setattr(splits.FileArray, "__getitem__", no_memory)
    with pytest.raises(InputError, match=r"data: expected data that fit into memory, found more; .*jpipe data prepare"):
        data.load(Config.model_validate(tiny | {"data": {"path": str(tmp_path / "a.txt")}}))
