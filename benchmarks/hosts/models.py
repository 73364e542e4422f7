"""Two models with many weights and few activations, and the plans that train them on two and four hosts."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe

ON_MESHES = "2BW, two devices each"
IN_PARTS = "data parallel, sum in parts"
MICROBATCHES = 12  # per batch, for all plans: divisible by 1, 2, 3 and 4 replicas
CLASSES, VOCABULARY, WORDS = 100, 4096, 8


class Workload(NamedTuple):
    """A model with its data.

    Attributes:
        stack: the model.
        batch: (inputs, labels) of one batch.
        cuts: by the number of hosts, before which layers a straight pipeline is cut.
        replicated: by the number of hosts, the same and the replicas of each stage; not for two hosts, where only data
            parallelism has replicas.
    """

    stack: Callable[[], jpipe.LayerStack]
    batch: Callable[[], tuple[np.ndarray, np.ndarray]]
    cuts: dict[int, tuple[int, ...]]
    replicated: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]


def vgg() -> jpipe.LayerStack:
    """Return a model of costly convolutions, followed by dense layers that hold 99% of the 6.6 million weights."""
    channels = (3, 32, 64, 64)
    convolutions = {f"conv_{i}": partial(_Convolution, channels[i], channels[i + 1]) for i in range(3)}
    dense = {f"dense_{i}": partial(_Dense, width, 2048) for i, width in enumerate((4 * 4 * channels[-1], 2048))}
    return jpipe.LayerStack({**convolutions, **dense, "classes": lambda rngs: nnx.Linear(2048, CLASSES, rngs=rngs)})


def lstm() -> jpipe.LayerStack:
    """Return a language model: word vectors, two LSTM layers, and a large output layer."""
    return jpipe.LayerStack(
        {
            "words": lambda rngs: nnx.Embed(VOCABULARY, 512, rngs=rngs),
            "lstm_0": lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(512, 512, rngs=rngs)),
            "lstm_1": lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(512, 512, rngs=rngs)),
            "next_word": lambda rngs: nnx.Linear(512, VOCABULARY, rngs=rngs),
        }
    )


def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the cross-entropy.

    Returns:
        The sum, and the number of labels.
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), jnp.asarray(labels.size, jnp.float32)


def make_plan(workload: Workload, kind: str, hosts: int) -> jpipe.Plan:
    """Return the plan of a name.

    Args:
        workload: what is trained.
        kind: a name of `kinds`.
        hosts: a worker on each.
    """
    ids = workload.stack().ids
    if kind in ("data parallel", IN_PARTS):
        return jpipe.Plan.even(ids, 1, "pipedream_flush", MICROBATCHES, replicas=hosts, sum_parts=4 if kind == IN_PARTS else 1)
    cuts, replicas = workload.replicated[hosts] if kind == "PipeDream, replicated" else (workload.cuts[hosts], (1,) * hosts)
    ends = zip((0, *cuts), (*cuts, len(ids)), replicas, strict=True)
    mesh = {"data": 2} if kind == ON_MESHES else {}
    stages = [jpipe.Stage(layers=ids[a:b], replicas=count, mesh=mesh) for a, b, count in ends]
    schedule = "pipedream" if kind.startswith("PipeDream, ") else "pipedream_2bw"
    return jpipe.Plan(schedule=schedule, microbatches=MICROBATCHES, stages=tuple(stages))


def sizes(workload: Workload) -> dict[str, tuple[int, float]]:
    """Return for each layer the bytes of its weights and of its output per sample.

    Args:
        workload: what is trained.
    """
    inputs, _ = workload.batch()
    layers = workload.stack().specs(inputs)
    return {layer_id: (_bytes(spec.params), _bytes(spec.output) / len(inputs)) for layer_id, spec in layers.items()}


def kinds(workload: Workload, hosts: int) -> list[str]:
    """Return the names of the compared plans, data parallelism first.

    Args:
        workload: what is trained.
        hosts: how many.
    """
    replicated = ["PipeDream, replicated"] if hosts in workload.replicated else []
    return ["data parallel", IN_PARTS, "PipeDream, straight", *replicated, "PipeDream-2BW", *([ON_MESHES] if hosts == 2 else [])]


class _Convolution(nnx.Module):
    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))


class _Dense(nnx.Module):
    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.linear(x.reshape(x.shape[0], -1)))


def _bytes(spec: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))


def _images(rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    images = draw.normal(size=(rows * MICROBATCHES, 32, 32, 3)).astype(np.float32)
    return images, draw.integers(0, CLASSES, len(images)).astype(np.int32)


def _sentences(rows: int) -> tuple[np.ndarray, np.ndarray]:
    words = np.random.default_rng(0).integers(0, VOCABULARY, (rows * MICROBATCHES, WORDS + 1)).astype(np.int32)
    return words[:, :-1], words[:, 1:]


WORKLOADS: dict[str, Workload] = {
    "VGG-like": Workload(vgg, partial(_images, 16), {2: (3,), 4: (1, 2, 4)}, {4: ((3,), (3, 1))}),
    "LSTM": Workload(lstm, partial(_sentences, 4), {2: (2,), 4: (1, 2, 3)}, {4: ((2, 3), (1, 2, 1))}),
}


def build(name: str, kind: str, hosts: int) -> tuple[jpipe.Pipeline, Any]:
    """Build the pipeline of a workload and plan, and its batch.

    Args:
        name: of `WORKLOADS`.
        kind: a name of `kinds`.
        hosts: a worker on each.
    """
    workload = WORKLOADS[name]
    pipe = jpipe.Pipeline(workload.stack(), make_plan(workload, kind, hosts), loss, optax.sgd(1e-3, momentum=0.9))
    return pipe, workload.batch()
