"""Videos as features of their frames, with captions, for S2VT."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float32, Int32

from examples.papers.arguments import DATA, MOST_POSITIONS, MOST_SYMBOLS, check_choice, check_integers
from examples.papers.data import npz_file
from examples.papers.data.sentences import FOLDER, Unusable, Words, data_of, in_order, lines_of, shifted, shown, usable
from jpipe import InputError
from jpipe.files import expanded
from jpipe_train.console.terminal import count
from jpipe_train.data import sources
from jpipe_train.data.data import Data

ARRAY = "features"
_MOST_FRAMES = 10**6
_MOST_BYTES = 2**32  # of the features of a video
Row = tuple[dict[str, np.ndarray], Int32[np.ndarray, " s"]]


@dataclass(frozen=True)
class Sizes:
    """The size of a row.

    Attributes:
        frames: n, of a video; of longer videos that many are used, evenly spaced, and shorter ones are filled up with zeros.
        words: s, of a caption, its end included.
        features: f, numbers of a frame.
    """

    frames: int = 50
    words: int = 30
    features: int = 4096


@dataclass(frozen=True)
class Captions:
    """Rows of captions: row i has caption i and the features of its video.

    Attributes:
        files: of the features, for each caption.
        captions: numbers of words, the end not included.
        end: the number that ends a caption, and starts one.
        sizes: what a row has.
    """

    files: list[Path]
    captions: list[np.ndarray]
    end: int
    sizes: Sizes

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Row:
        tokens, labels = shifted(self.captions[index], self.end, self.sizes.words)
        return {"features": features_of(self.files[index], self.sizes), "tokens": tokens}, labels


def features_of(file: Path, sizes: Sizes) -> Float32[np.ndarray, "n f"]:
    """Read the features of a fixed number of frames of a video.

    A longer video gives evenly spaced frames; a shorter one is filled up with zeros.

    Raises:
        InputError: the file is missing, damaged, or holds something else.
        OSError: it cannot be read.
    """
    _check_file(file, sizes)
    with np.errstate(over="ignore"):  # what is too large for float32 is not finite
        frames = npz_file.read(file, ARRAY, FOLDER, _MOST_BYTES).astype(np.float32)
    if not np.isfinite(frames).all():
        raise InputError(f"{FOLDER}: '{file}': expected finite features, found NaN or infinity; make it again")
    features = np.zeros((sizes.frames, sizes.features), np.float32)
    at = np.linspace(0, len(frames) - 1, sizes.frames).round().astype(int) if len(frames) > sizes.frames else np.arange(len(frames))
    features[: at.size] = frames[at]
    return features


def load(
    seed: int,
    batch_size: int,
    folder: str,
    frames: int = 50,
    words: int = 30,
    features: int = 4096,
    vocab_size: int | None = None,
    unusable: Unusable = "refuse",
) -> Data:
    """Read the captions of a folder and check each video's file; features are read together with their rows.

    Args:
        seed: of the order of the captions.
        batch_size: rows of a batch.
        folder: has `train.tsv` and `validation.tsv` (lines of a video's name, a tab, a caption), and `features/NAME.npz` for each video,
            whose array `features` has a row for each frame.
        frames: as in `Sizes`.
        words: as in `Sizes`.
        features: as in `Sizes`.
        vocab_size: the number of the most frequent words to keep; None: all.
        unusable: raise an error for a caption that is empty or longer ("refuse"), or drop it.

    Raises:
        InputError: an argument is out of range; a file is missing, truncated or no such file, a line is no name with a caption, or
            captions that cannot be used, with `unusable` "refuse"; there is less than a batch for validation.
    """
    check_integers(DATA, 1, MOST_POSITIONS, frames=frames, words=words, features=features)
    if vocab_size is not None:
        check_integers(DATA, 2, MOST_SYMBOLS, vocab_size=vocab_size)
    check_choice(DATA, ("refuse", "drop"), unusable=unusable)
    sizes = Sizes(frames, words, features)
    lines = {part: _split(folder, f"{part}.tsv") for part in ("train", "validation")}
    captions = {part: [caption.split() for _, caption in pairs] for part, pairs in lines.items()}
    vocabulary = Words.of(captions["train"], vocab_size)
    features_folder = expanded(folder, FOLDER) / "features"
    parts, remarks = {}, []
    for part, pairs in lines.items():
        lengths = np.asarray([len(caption) for caption in captions[part]], np.int64)
        used, remark = usable([lengths], [words], [f"{part}.tsv"], unusable)
        files = [features_folder / f"{pairs[i][0]}.npz" for i in used]
        parts[part] = Captions(files, [vocabulary.numbers(captions[part][i]) for i in used], vocabulary.end, sizes)
        remarks.append(remark)
    files = sorted({file for part in parts.values() for file in part.files})
    with sources.readable(FOLDER):
        for file in files:
            _check_file(file, sizes)
        file_sizes = np.asarray([file.stat().st_size for file in files])
    if unknown := vocabulary.unknown(captions["validation"]):
        remarks.append(f"{count(unknown, 'word')} of the captions for validation not known")
    tokens = jax.ShapeDtypeStruct((words,), np.dtype(np.int32))
    of_features = jax.ShapeDtypeStruct((frames, features), np.dtype(np.float32))
    spec = {"features": of_features, "tokens": tokens}, tokens
    train, validation = parts["train"], parts["validation"]
    amount = f"{len(train):,} captions for training, {len(validation):,} for validation, of {len(files):,} videos"
    arrays = [*train.captions, *validation.captions, file_sizes]
    ordered = in_order(train, seed, epochs=True), in_order(validation, 0, epochs=False)
    return data_of(ordered, spec, batch_size, shown(folder), amount, arrays, len(vocabulary.words), remarks)


def _split(folder: str, name: str) -> list[tuple[str, str]]:
    """Split each line into the name of a video and a caption."""
    pairs = []
    for number, line in enumerate(lines_of(folder, name), 1):
        video, tab, caption = line.partition("\t")
        if not video or Path(video).name != video or (not tab and " " in video):
            raise InputError(f"{FOLDER}: '{name}', line {number}: expected the name of a video, a tab and a caption; correct it")
        pairs.append((video, caption))
    return pairs


def _check_file(file: Path, sizes: Sizes) -> None:
    """Check that a file has features of frames; only its header is read.

    Raises:
        InputError: that.
        OSError: it cannot be read.
    """
    if not file.exists():
        raise InputError(f"{FOLDER}: there is no file '{file}', which a caption names; add it, or remove its captions")
    shape, dtype = npz_file.header(file, ARRAY, FOLDER)
    if len(shape) != 2 or shape[1] != sizes.features or not 1 <= shape[0] <= _MOST_FRAMES or dtype.kind != "f":
        raise InputError(
            f"{FOLDER}: '{file}': expected float features of 1 to {_MOST_FRAMES:,} frames, {sizes.features} each "
            f"(data.arguments.features), found {dtype} of shape {list(shape)}; change one of them"
        )
    if shape[0] * shape[1] * dtype.itemsize > _MOST_BYTES:
        raise InputError(f"{FOLDER}: '{file}': expected at most {_MOST_BYTES / 2**30:g} GiB of features, found more; take fewer frames")
