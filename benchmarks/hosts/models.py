"""Three models with many weights and few activations, and the plans that train them on two and four hosts."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import layers

MICROBATCHES = 12  # per batch, for all plans: divisible by 1, 2, 3 and 4 replicas
CLASSES, VOCABULARY, WORDS, BYTES = 100, 4096, 8, 64


class Kind(NamedTuple):
    """A plan that is compared.

    Attributes:
        schedule: of the pipeline.
        cut: "replicas", one stage on all hosts; "straight", a stage for each host; "replicated", as the workload says; "pipelines", two
            pipelines with a stage for each host.
        options: further fields of the plan, or arguments of `jpipe.Plan.even` for one stage.
        mesh: of each stage.
        hosts: where it is compared.
    """

    schedule: str
    cut: str
    options: Mapping[str, Any] = {}
    mesh: Mapping[str, int] = {}
    hosts: tuple[int, ...] = (2, 4)

    @property
    def every(self) -> int:
        """Updates from one agreement of replicas to the next; a measurement takes a multiple of them."""
        return int(self.options.get("agree", {}).get("every", 1))

    @property
    def warm_up(self) -> int:
        """Updates before the first trial: each measurement begins when an agreement has been applied, and has all of the next one."""
        return self.every + int(self.options.get("agree", {}).get("delay", 0)) + 1

    @property
    def trial(self) -> int:
        """Updates of the short run before a measurement; with those of the measurement they are a multiple of `every`."""
        return 3 if self.every == 1 else self.every - 1

    @property
    def devices(self) -> int:
        """How many devices each host has."""
        return math.prod(self.mesh.values())


_AGREE = {"agree": {"every": 50}}
_LATE = {"agree": {"every": 50, "delay": 25}}
_INT8 = {"links": {"activations": "int8", "gradients": "int8"}}
KINDS: dict[str, Kind] = {
    "data parallel": Kind("pipedream_flush", "replicas"),
    "data parallel, sum in parts": Kind("pipedream_flush", "replicas", {"sum_parts": 4}),
    "PipeDream, straight": Kind("pipedream", "straight"),
    "PipeDream, replicated": Kind("pipedream", "replicated", hosts=(4,)),
    "PipeDream-2BW": Kind("pipedream_2bw", "straight"),
    "2BW, two devices each": Kind("pipedream_2bw", "straight", mesh={"data": 2}, hosts=(2,)),
    "flush": Kind("pipedream_flush", "straight"),
    "2BW, int8 messages": Kind("pipedream_2bw", "straight", _INT8),
    "replicas that agree every 50": Kind("pipedream_flush", "replicas", _AGREE),
    "replicas that agree every 50, 25 late": Kind("pipedream_flush", "replicas", _LATE),
    "two pipelines that agree every 50": Kind("pipedream_flush", "pipelines", _AGREE, hosts=(4,)),
}
OF_THE_PAPERS = ("data parallel", "data parallel, sum in parts", "PipeDream, straight", "PipeDream, replicated", "PipeDream-2BW")
OF_MESSAGES = ("data parallel", "flush", "PipeDream-2BW", *list(KINDS)[7:])


class Workload(NamedTuple):
    """A model with its data.

    Attributes:
        stack: the model.
        batch: (inputs, labels) of one batch.
        cuts: by the number of hosts, before which layers a straight pipeline is cut.
        replicated: by the number of hosts, the same and the replicas of each stage; not for two hosts, where only data
            parallelism has replicas.
        kinds: the names of the compared plans, data parallelism first.
        rates: of the links, Mbit/s; empty: those at which data parallelism communicates for given shares of its time.
    """

    stack: Callable[[], jpipe.LayerStack]
    batch: Callable[[], tuple[np.ndarray, np.ndarray]]
    cuts: dict[int, tuple[int, ...]]
    replicated: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    kinds: tuple[str, ...] = (*OF_THE_PAPERS, "2BW, two devices each")
    rates: tuple[float, ...] = ()


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


def gpt() -> jpipe.LayerStack:
    """Return a GPT of bytes with four blocks of width 256."""
    return layers.layers(ModelConfig(depth=4, width=256, heads=4, seq_len=BYTES))


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
    ids, of_kind = workload.stack().ids, KINDS[kind]
    if of_kind.cut == "replicas":
        return jpipe.Plan.even(ids, 1, of_kind.schedule, MICROBATCHES, replicas=hosts, **of_kind.options)
    if of_kind.cut == "straight":
        cuts, replicas = workload.cuts[hosts], (1,) * hosts
    elif of_kind.cut == "pipelines":
        cuts, replicas = workload.cuts[hosts // 2], (2,) * (hosts // 2)
    else:
        cuts, replicas = workload.replicated[hosts]
    ends = zip((0, *cuts), (*cuts, len(ids)), replicas, strict=True)
    stages = [{"layers": ids[a:b], "replicas": count, "mesh": of_kind.mesh} for a, b, count in ends]
    return jpipe.Plan(schedule=of_kind.schedule, microbatches=MICROBATCHES, stages=stages, **of_kind.options)


def sizes(workload: Workload) -> dict[str, tuple[int, float]]:
    """Return for each layer the bytes of its weights and of its output per sample.

    Args:
        workload: what is trained.
    """
    inputs, _ = workload.batch()
    specs = workload.stack().specs(inputs)
    return {layer_id: (_bytes(spec.params), _bytes(spec.output) / len(inputs)) for layer_id, spec in specs.items()}


def kinds(workload: Workload, hosts: int) -> list[str]:
    """Return the names of the compared plans, data parallelism first.

    Args:
        workload: what is trained.
        hosts: how many.
    """
    return [name for name in workload.kinds if hosts in KINDS[name].hosts]


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


def _texts(rows: int) -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(0).integers(0, 256, (rows * MICROBATCHES, BYTES + 1)).astype(np.int32)
    return text[:, :-1], text[:, 1:]


WORKLOADS: dict[str, Workload] = {
    "VGG-like": Workload(vgg, partial(_images, 16), {2: (3,), 4: (1, 2, 4)}, {4: ((3,), (3, 1))}),
    "GPT": Workload(gpt, partial(_texts, 1), {2: (3,), 4: (2, 3, 4)}, {}, OF_MESSAGES, (100.0, 1000.0)),
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
