"""Generate small data sets of sentences: a language with its translation, a running text, captions of videos."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from rich.console import Console

from jpipe.files import create
from jpipe_lm.data import document_files, prepare, texts, tokenizer
from jpipe_train.console.progress import Reporter

PAIRS = {"train": 4000, "validation": 256}
LINES = {"train": 4000, "validation": 1000}
VIDEOS = {"train": 240, "validation": 64}
FEATURES, FRAMES = 32, (6, 14)  # numbers of a frame; fewest and most frames of a video
_SYMBOLS = 512  # of the tokenizer, at most

NOUNS: Mapping[str, str] = MappingProxyType(
    {
        **{"dog": "hund", "cat": "katze", "bird": "vogel", "horse": "pferd", "child": "kind", "teacher": "lehrer"},
        **{"river": "fluss", "house": "haus", "garden": "garten", "mountain": "berg", "friend": "freund", "ship": "schiff"},
    }
)
ADJECTIVES: Mapping[str, str] = MappingProxyType(
    {"small": "klein", "old": "alt", "red": "rot", "quiet": "still", "young": "jung", "bright": "hell", "tired": "müd", "wild": "wild"}
)
VERBS: Mapping[str, str] = MappingProxyType(
    {"sees": "sieht", "finds": "findet", "hears": "hört", "follows": "folgt", "likes": "mag", "draws": "malt", "knows": "kennt"}
)
ADVERBS: Mapping[str, str] = MappingProxyType({"today": "heute", "often": "oft", "always": "immer", "rarely": "selten"})
ARTICLES: Mapping[str, str] = MappingProxyType({"the": "das", "one": "ein"})


def make_translation(folder: Path, seed: int) -> str:
    """Write `train.source`, `train.target`, the same for `validation`, and `tokenizer.json` into an empty folder.

    The translation has a word for each word, the adjective behind its noun, the verb behind what it is done to.

    Args:
        folder: an empty one.
        seed: of the sentences.

    Returns:
        A description of what was written.
    """
    rng = np.random.default_rng(seed)
    for part, number in PAIRS.items():
        pairs = [_pair(rng) for _ in range(number)]
        for name, side in (("source", 0), ("target", 1)):
            _write(folder / f"{part}.{name}", [pair[side] for pair in pairs])
    sources = [str(folder / f"train.{name}") for name in ("source", "target")]
    quiet = Reporter(1, 1, "bytes", Console(quiet=True))
    prepare.make_tokenizer(document_files.Files(sources, "text", texts.Keys()), _SYMBOLS, str(folder / tokenizer.FILE), quiet)
    return f"{PAIRS['train']} pairs of sentences for training, {PAIRS['validation']} for validation, and a tokenizer"


def make_words(folder: Path, seed: int) -> str:
    """Write `train.txt` and `validation.txt` into an empty folder: each sentence is about the last noun of the one before.

    Args:
        folder: an empty one.
        seed: of the sentences.

    Returns:
        A description of what was written.
    """
    rng = np.random.default_rng(seed)
    for part, number in LINES.items():
        lines, subject = [], str(rng.choice(list(NOUNS)))
        for _ in range(number):
            article, other = str(rng.choice(list(ARTICLES))), str(rng.choice(list(NOUNS)))
            verb, adverb = (str(rng.choice(list(words))) for words in (VERBS, ADVERBS))
            lines.append(f"the {subject} {adverb} {verb} {article} {_adjective(rng, other)}{other}")
            subject = other
        _write(folder / f"{part}.txt", lines)
    return f"{LINES['train']} sentences for training, {LINES['validation']} for validation"


def make_captions(folder: Path, seed: int) -> str:
    """Write `train.tsv`, `validation.tsv` and `features/NAME.npz` of each video into an empty folder.

    A frame is the sum of one direction for who does something, one for what is done, one for how (more and more of the latter), and noise.

    Args:
        folder: an empty one.
        seed: of the videos; the directions are the same for all.

    Returns:
        A description of what was written.
    """
    rng = np.random.default_rng(seed)
    meaning = np.random.default_rng(0).normal(size=(3, len(NOUNS), FEATURES))
    (folder / "features").mkdir()
    for part, number in VIDEOS.items():
        lines = []
        for i in range(number):
            chosen = [int(rng.integers(len(words))) for words in (NOUNS, VERBS, ADVERBS)]
            who, what, how = (list(words)[at] for words, at in zip((NOUNS, VERBS, ADVERBS), chosen, strict=True))
            frames = int(rng.integers(FRAMES[0], FRAMES[1] + 1))
            late = np.linspace(0, 1, frames)[:, None]
            seen = meaning[0, chosen[0]] + meaning[1, chosen[1]] * (1 - late) + meaning[2, chosen[2]] * late
            _write_features(folder / "features" / f"{part}_{i:03d}.npz", seen + rng.normal(scale=0.3, size=seen.shape))
            lines += [f"{part}_{i:03d}\tone {who} {how} {what} something", f"{part}_{i:03d}\tthe {who} {what} something {how}"]
        _write(folder / f"{part}.tsv", lines)
    return f"{VIDEOS['train']} videos for training, {VIDEOS['validation']} for validation, each with two captions"


def _pair(rng: np.random.Generator) -> tuple[str, str]:
    """Draw a sentence, and translate it."""
    chosen = [list(words.items())[int(rng.integers(len(words)))] for words in (ARTICLES, ADJECTIVES, NOUNS, VERBS, ARTICLES, NOUNS)]
    adverb = [list(ADVERBS.items())[int(rng.integers(len(ADVERBS)))]] if rng.random() < 0.5 else []
    (article, adjective, who, does, other, whom), ends = chosen, adverb
    source, target = (article, adjective, who, does, other, whom, *ends), (article, who, adjective, other, whom, does, *ends)
    return " ".join(pair[0] for pair in source), " ".join(pair[1] for pair in target)


def _adjective(rng: np.random.Generator, noun: str) -> str:
    """Draw whether a noun has its usual adjective, or none."""
    number = list(NOUNS).index(noun) % len(ADJECTIVES)
    return f"{list(ADJECTIVES)[number]} " if rng.random() < 0.7 else ""


def _write(path: Path, lines: Sequence[str]) -> None:
    with create(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _write_features(path: Path, features: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, features=features.astype(np.float32))
    with create(path) as file:
        file.write(content.getvalue())
