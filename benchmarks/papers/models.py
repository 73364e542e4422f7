"""Analytic profiles of the models of `configs/papers/`, each computed once in a run, and the papers' clusters.

Images need no files. The data of the other models is that of `examples.papers.samples`, which gives the shapes of a row.
"""

import contextlib
import functools
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console

import jpipe
from examples.papers.samples import make
from jpipe_lm.config.model.presets import PRESETS
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import layers
from jpipe_planner import LayerProfile, Level, Profile, Topology, analyze
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.losses import cross_entropy
from jpipe_train.plan.profiling import Parts

CONFIGS = Path(__file__).parents[2] / "configs"
FEATURES = 4096  # of a frame, as in the paper; the sample has fewer


class Paper(NamedTuple):
    """A model of PipeDream's table 1, or of its preprint.

    Attributes:
        config: its name in `configs/papers/`.
        rows: the paper's microbatch for each GPU.
        sample: the name of the data in `examples.papers.samples`; "": it needs none.
        overrides: `key=value` for the config.
    """

    config: str
    rows: int
    sample: str = ""
    overrides: tuple[str, ...] = ()


WORDS = 48
"""Of a sentence in the translators' data, as in the profile of GNMT-8 that PipeDream's authors published with their code.

Its LSTMs return states of 131,072 bytes, which are 32 sentences of 1,024 float32, and outputs of 6,291,456 bytes: 48 words of each.
"""
_SENTENCES = f"data.arguments.source_length={WORDS}", f"data.arguments.target_length={WORDS}"


PIPEDREAM = {
    "VGG-16": Paper("vgg16", 64),
    "ResNet-50": Paper("resnet50", 128),
    "AlexNet": Paper("alexnet", 256),
    "GNMT-16": Paper("gnmt-16", 64, "translation", _SENTENCES),
    "GNMT-8": Paper("gnmt-8", 64, "translation", _SENTENCES),
    "AWD-LM": Paper("awd-lm", 80, "words"),
    "S2VT": Paper("s2vt", 80, "captions", ("data.arguments.features=32",)),
    "Inception-v3": Paper("inception-v3", 32),
}
"""By name in the papers."""

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "GPT, 1.3B": {"preset": "gpt-1.3b"},
    "GPT, 2.2B": {"preset": "gpt-2.2b"},
    "GPT, 3.8B": {"preset": "gpt-3.8b"},
    "BERT, 2.2B": {"preset": "bert-355m", "depth": 48, "width": 1920, "heads": 20},
    "BERT, 3.8B": {"preset": "bert-355m", "depth": 48, "width": 2560, "heads": 20},
}
"""The keys of `model`, by name. 2BW's BERTs have no preset: their depths and widths are those of its GPTs."""


def topology(name: str) -> Topology:
    """Read a topology of `configs/topologies/`."""
    file = CONFIGS / "topologies" / f"{name}.yaml"
    return Topology.from_yaml(file.read_text(encoding="utf-8"), file.name)


def servers(cluster: str, count: int, bandwidth_inside: float | None = None) -> Topology:
    """Return a number of servers of a cluster of two levels.

    Args:
        cluster: a name in `configs/topologies/`.
        count: the servers.
        bandwidth_inside: of the links inside a server, in bytes per second; None: as in the file.
    """
    whole = topology(cluster)
    inside, between = whole.levels
    if bandwidth_inside:
        inside = inside.model_copy(update={"bandwidth": bandwidth_inside})
    levels: tuple[Level, ...] = (inside, between.model_copy(update={"count": count})) if count > 1 else (inside,)
    return whole.model_copy(update={"levels": levels})


@functools.cache
def pipedream_profile(name: str, rows: int = 0) -> Profile:
    """Profile a model of `PIPEDREAM` for the device of Cluster-A.

    Args:
        name: of the model.
        rows: of a microbatch; 0: as many as in the paper.
    """
    paper = PIPEDREAM[name]
    console = Console(file=io.StringIO(), width=200)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if paper.sample:
            sample = Path("samples") / paper.sample
            sample.mkdir(parents=True)
            make.SAMPLES[paper.sample](sample, 0)
        parts = Parts.of(
            config_file.load(CONFIGS / "papers" / f"{paper.config}.yaml", paper.overrides, allow_code=True), Reporter(1, 1, "rows", console)
        )

        def batch(count: int) -> Any:
            inputs, labels = parts.rows(count)
            if paper.sample == "captions":
                frames = inputs["features"]
                inputs = {**inputs, "features": jax.ShapeDtypeStruct((*frames.shape[:-1], FEATURES), frames.dtype)}
            return inputs, labels

        device = topology("cluster-a").device
        model = parts.stack, batch, parts.loss, parts.rule
        return analyze(*model, (rows or paper.rows,), device, policies=("none",), precision=parts.precision)


@functools.cache
def transformer_profile(name: str, sizes: tuple[int, ...], policies: tuple[str, ...]) -> Profile:
    """Profile a model of `TRANSFORMERS` in mixed precision, for the GPU of 2BW's servers; embedding and head share no weights.

    Blocks are equal, so two of them are profiled and repeated.
    """
    return with_blocks(two_blocks(name, sizes, policies), _keys(name)["depth"])


@functools.cache
def two_blocks(name: str, sizes: tuple[int, ...], policies: tuple[str, ...]) -> Profile:
    """Profile a model of `TRANSFORMERS` with two blocks."""
    keys = _keys(name)
    keys["tied"] = keys.get("kind") == "bert"  # which is always tied; `with_blocks` leaves it out
    config = ModelConfig(**{**keys, "depth": 2})

    def batch(count: int) -> Any:
        tokens = jax.ShapeDtypeStruct((count, config.seq_len), np.int32)
        labels = {"tokens": tokens, "next": jax.ShapeDtypeStruct((count,), np.int32)} if config.kind == "bert" else tokens
        return tokens, labels

    model = layers.layers(config), batch, cross_entropy.loss, optax.adam(1e-4)
    device = topology("v100-16gb-8").device
    return analyze(*model, sizes, device, policies=policies, precision=jpipe.Precision(params="bfloat16"))


def _keys(name: str) -> dict[str, Any]:
    keys = {**PRESETS[TRANSFORMERS[name]["preset"]], **TRANSFORMERS[name]}
    del keys["preset"]
    return keys


def with_blocks(profile: Profile, count: int, sizes: Sequence[int] = ()) -> Profile:
    """Repeat the blocks of a profile; equal blocks need no profiles of their own.

    Args:
        profile: of an embedding, at least two blocks and a head.
        count: the blocks.
        sizes: the microbatch sizes to keep, by default all.
    """
    chosen = [n for n, rows in enumerate(profile.sizes) if rows in (sizes or profile.sizes)]

    def layer(n: int, name: str) -> LayerProfile:
        one = profile.layers[n]
        return one.model_copy(update={"id": name, "at": tuple(one.at[k] for k in chosen)})

    before_head = count - 1  # the block whose output the head takes
    blocks = [layer(-2 if n == before_head else 1, f"block_{n}") for n in range(count)]
    parts = {name: tuple(getattr(profile, name)[k] for k in chosen) for name in ("sizes", "inputs", "labels")}
    all_layers = (layer(0, profile.ids[0]), *blocks, layer(-1, profile.ids[-1]))
    return Profile(source=profile.source, device=profile.device, layers=all_layers, **parts)
