"""Restore checkpoints of each plan under every other plan, and compare one run in different numbers of processes."""

import contextlib
import io
import itertools
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import jpipe
import jpipe.checkpoints
from benchmarks.faults.runs import KINDS, LIMIT, config_of, difference, end_of, last_words, launched
from benchmarks.planner.markdown import print_table
from jpipe_train.checkpoint.resume import find
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.launch.team import Team
from jpipe_train.run import loop, starting

PLANS: dict[str, dict[str, Any]] = {
    "data parallel, 4": {"schedule": "pipedream_flush", "num_stages": 1, "replicas": 4, "microbatches": 4},
    "GPipe, 2": {"schedule": "gpipe", "num_stages": 2, "microbatches": 4, "recompute": "full"},
    "PipeDream, 3": {"schedule": "pipedream", "num_stages": 3, "microbatches": 1},
    "vertical sync, 4": {"schedule": "pipedream", "num_stages": 4, "microbatches": 1, "vertical_sync": True},
    "2BW, 2 × 2": {"schedule": "pipedream_2bw", "num_stages": 2, "replicas": 2, "microbatches": 4},
    "PipeDream, 2-1-1": {"schedule": "pipedream", "num_stages": 3, "replicas": [2, 1, 1], "microbatches": 2},
}
"""Plans with different depths, cuts, replicas, schedules and recomputation."""
STEPS = 6
COUNTS = 1, 2, 4


def pairs(folder: Path) -> list[dict[str, Any]]:
    """Restore, continue, print and return the figures.

    Args:
        folder: where the runs are written.
    """
    for number, plan in enumerate(PLANS.values()):
        with contextlib.redirect_stdout(io.StringIO()):
            loop.main(Config.model_validate(config_of(folder / str(number), plan, STEPS)))
    results: dict[tuple[str, str], str | None] = {}
    for (number, one), other in itertools.product(enumerate(PLANS), PLANS):
        results[one, other] = outcome(folder / str(number), PLANS[other])
        print(f"{one} → {other}: {results[one, other] or 'the same weights and optimizer state; trains on'}", flush=True)
    print_table(("from, to", *PLANS), [(one, *("wrong" if results[one, other] else "same" for other in PLANS)) for one in PLANS])
    return [{"from": one, "to": other, "wrong": wrong} for (one, other), wrong in results.items()]


def outcome(folder: Path, plan: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the run in `folder` resumed under another plan, or None."""
    config = Config.model_validate(config_of(folder, plan, STEPS + 2))
    team, reporter = Team(None), Reporter(STEPS, *data.portion(config), Console(quiet=True))
    try:
        resumed = find(config.run.dir, "must", team, reporter.say)
        assert resumed is not None
        pipe, batches = loop.build_and_check(config, reporter)
        layers, damaged = starting.read_checkpoint(pipe, batches, team, resumed, fresh_optimizer=False)
        if layers is None:
            return damaged
        state = starting.begin(config.seed, pipe, batches, resumed, layers)
        saved = jpipe.checkpoints.Checkpoint(folder / "run", STEPS).read()
        if wrong := difference(_newest(state), {layer_id: _leaves(saved[layer_id]) for layer_id in pipe.stack.ids}, "restored"):
            return wrong
        losses: dict[int, Any] = {}
        for step in (STEPS, STEPS + 1):
            state, metrics = pipe.step(state, batches.train[step])
            losses |= metrics.losses
        pipe.drain(state)
        return None if len(losses) == 2 and all(math.isfinite(float(loss)) for loss in losses.values()) else f"losses {losses}"
    except jpipe.InputError as error:
        return str(error)


def by_processes(folder: Path) -> list[dict[str, Any]]:
    """Compare one run in different numbers of processes with the first; print and return the figures.

    Args:
        folder: where the runs are written.
    """
    results = []
    for kind in KINDS:
        ends = []
        for count in COUNTS:
            place = folder / str(count)
            shutil.rmtree(place, ignore_errors=True)
            with launched(config_of(place, KINDS[kind], STEPS), place, count) as process:
                if process.wait(LIMIT):
                    raise RuntimeError(f"bench-faults: {kind} in {count} processes failed: {last_words(place)}")
            ends.append(end_of(place / "run"))
        wrong = next((text for end in ends[1:] if (text := difference(end, ends[0], "end"))), None)
        results.append({"kind": kind, "processes": COUNTS, "wrong": wrong})
        print(f"{kind}: by {', '.join(map(str, COUNTS))} processes {wrong or 'identical'}", flush=True)
    return results


def _newest(state: jpipe.State) -> dict[str, Any]:
    """Return by layer id the leaves of the newest weights and of the optimizer state, checked to be equal in all replicas."""
    first_replicas: dict[str, Any] = {}
    for worker in state.workers:
        for layer_id, params in worker.weights.read(worker.weights.newest).items():
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((params, worker.optimizer[layer_id]))]
            assert difference(first_replicas.setdefault(layer_id, leaves), leaves) is None, "replicas that differ"
    return first_replicas


def _leaves(layer: Mapping[str, Any]) -> list[np.ndarray]:
    """Return leaves in the same order: parameters and momentum are sorted by name."""
    return jax.tree.leaves((layer["params"]["0"], layer["optimizer"]))
