"""The tasks of time to accuracy: three small models of the papers, their data, and how they are trained."""

from pathlib import Path
from typing import NamedTuple

from rich.console import Console

import jpipe
from jpipe_planner import Profile, Ranked, Topology, measure
from jpipe_train.assemble import model
from jpipe_train.assemble.build import build
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.data.data import Data
from jpipe_train.plan.inputs import Request
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import search

CONFIGS = Path(__file__).parents[2] / "configs" / "papers"
SCHEDULES = ("pipedream", "pipedream_2bw", "pipedream_flush")  # those of the papers; data parallelism is the last one with one stage
SIZES = (8, 16)  # rows of a microbatch to plan with; the batch has 32
LATENCY = 0.5e-3  # seconds of a message between two hosts
_QUIET = Reporter(1, 1, "samples", Console(quiet=True))


class Task(NamedTuple):
    """A model with its data and links.

    Attributes:
        config: a file of `configs/papers/`.
        changes: of its keys; the optimizer and its rate are those of both runs.
        sample: that `examples.papers.samples` writes.
        rate: of each link, bits per second: one at which data parallelism communicates most of its time.
        target: validation loss that ends a run.
        every: steps between two validations.
        most: steps of a run that does not reach the target.
    """

    config: str
    changes: tuple[str, ...]
    sample: str
    rate: float
    target: float
    every: int
    most: int


TASKS: dict[str, Task] = {
    "VGG-16": Task(
        "vgg16-small",
        ("model.arguments.batch_norm=false", "optimizer={name: adam, learning_rate: 1.0e-3, warmup_steps: 20}", "train.eval_batches=5"),
        "images",
        100e6,
        1.4,
        10,
        600,
    ),
    "GNMT-8": Task(
        "gnmt-8-small",
        ("model.arguments.width=192", "optimizer={name: adam, learning_rate: 2.0e-3, warmup_steps: 20}", "train.eval_batches=4"),
        "translation",
        200e6,
        1.5,
        20,
        500,
    ),
    "AWD-LM": Task(
        "awd-lm-small",
        (
            "model.arguments={vocab_size: 64, depth: 3, width: 96, hidden: 192, tied: false, carries: false, dropout_words: 0.0, "
            "dropout_input: 0.0, dropout_hidden: 0.0, dropout_output: 0.0, dropout_weights: 0.0}",
            "optimizer={name: adam, learning_rate: 3.0e-3, warmup_steps: 20}",
            "train.eval_batches=4",
        ),
        "words",
        50e6,
        1.6,
        10,
        300,
    ),
}


def load(task: Task, samples: Path) -> Config:
    """Load the config of a task.

    Args:
        task: what is trained.
        samples: the folder with the data set of each task, by its name.
    """
    folder = samples / task.sample
    folders = {"folder": folder}
    if task.sample == "images":
        folders = {"folder": folder / "train", "validation_folder": folder / "val"}
    changes = [*task.changes, *(f"data.arguments.{key}={path}" for key, path in folders.items())]
    return config_file.load(CONFIGS / f"{task.config}.yaml", changes, allow_code=True)


def profile(config: Config) -> Profile:
    """Measure the layers' times on one core, and their bytes.

    Args:
        config: of a task.
    """
    parts = Parts.of(config, _QUIET)
    return measure(parts.stack, parts.rows, parts.loss, parts.rule, SIZES, policies=("none",), seconds=10.0)


def plans(config: Config, layer_costs: Profile, hosts: int, rate: float, cores: int) -> tuple[Ranked, ...]:
    """Find the planner's plans that use all hosts, fastest first.

    Args:
        config: of a task.
        layer_costs: its profile.
        hosts: a worker on each.
        rate: of each link, bits per second.
        cores: that the hosts share.
    """
    level = {"count": hosts, "bandwidth": rate / 8, "latency": LATENCY, "name": "network"}
    topology = Topology(name=f"{hosts} hosts", levels=(level,), cores=float(max(min(cores, hosts), 1)))
    carries_rows = model.layers(config).carries_rows
    request = Request(all_devices=True, schedules=SCHEDULES, replicas=not carries_rows)
    choice = search(layer_costs, topology, config.train.batch_size, request, False, _QUIET).choice
    return tuple(ranked for ranked in choice.ranked)


def pipeline(config: Config, plan: jpipe.Plan) -> tuple[jpipe.Pipeline, Data]:
    """Build the pipeline as `jpipe train` does.

    Args:
        config: of a task.
        plan: how it is trained.
    """
    return build(config, _QUIET, plan)
