"""A training program for tests of several processes, and the function that starts it.

`python -m tests.jpipe.several train GROUP ADDRESS COUNT INDEX FILE` trains the cases of a group, one after the other, and writes all that
it found to FILE; with COUNT 1 all workers are in one process. `endless` trains one case until it is killed; in `differ` the processes
pass different things. Under the plugin `tests.on_gpu` all processes share one GPU.
"""

import atexit
import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

CASES: dict[str, dict[str, dict]] = {
    "2": {
        "2bw": {"num_stages": 2, "schedule": "pipedream_2bw", "microbatches": 3, "clip": 3.0, "ema": 0.5},
        "tied": {
            "num_stages": 2,
            "schedule": "pipedream_2bw",
            "microbatches": 4,
            "replicas": (1, 2),
            "placement": [[0], [1, 0]],
            "sum_parts": 2,
            "tied": True,
        },
        "slices": {"num_stages": 2, "schedule": "pipedream_flush", "microbatches": 2, "slices": (3, 7), "clip": 3.0},
    },
    "2, options": {
        "sums in parts": {
            "num_stages": 2,
            "schedule": "pipedream_2bw",
            "microbatches": 4,
            "replicas": 2,
            "placement": [[0, 1], [0, 1]],
            "sum_parts": 2,
            "clip": 3.0,
        },
        "round_robin": {
            "num_stages": 2,
            "schedule": "pipedream",
            "microbatches": 6,
            "replicas": (3, 2),
            "placement": [[0, 0, 1], [1, 0]],  # the sum is added up process by process: neighbours in one, for the same bits
            "stage_clip": 1.0,
        },
        "masters": {"num_stages": 2, "schedule": "pipedream", "microbatches": 1, "params": "bfloat16", "stage_clip": 1.0},
        "lengths": {"num_stages": 2, "schedule": "pipedream", "microbatches": 2, "lengths": True},
        "agree rarely": {
            "num_stages": 2,
            "schedule": "pipedream_2bw",
            "microbatches": 4,
            "replicas": 2,
            "placement": [[0, 1], [0, 1]],
            "agree": {"every": 2, "fragments": "stages"},
        },
        "agree late": {  # it is evaluated, and ends, with an agreement of a stage under way
            "num_stages": 2,
            "schedule": "pipedream_flush",
            "microbatches": 4,
            "replicas": 2,
            "placement": [[0, 1], [0, 1]],
            "agree": {"every": 3, "fragments": "stages", "delay": 2},
        },
        "compressed": {
            "num_stages": 2,
            "schedule": "pipedream_2bw",
            "microbatches": 3,
            "links": {"activations": "fp8", "gradients": "int8", "rounding": "stochastic"},
        },
        "compressed sums": {
            "num_stages": 2,
            "schedule": "pipedream_flush",
            "microbatches": 6,
            "replicas": (3, 2),
            "placement": [[0, 1, 0], [1, 0]],  # added up in the order of the replicas, wherever they are
            "links": {"sums": "int8", "rounding": "stochastic"},
            "sum_parts": 2,
            "clip": 3.0,
        },
        "in a V": {"num_stages": 4, "schedule": "zb_v", "microbatches": 3, "clip": 3.0},
        "shared optimizer": {
            "num_stages": 2,
            "schedule": "pipedream_flush",
            "microbatches": 4,
            "replicas": 2,
            "placement": [[0, 1], [0, 1]],
            "shard_optimizer": True,
            "clip": 3.0,
        },
    },
    "2, corrected": {
        "tied, frozen": {
            "num_stages": 2,
            "schedule": "pipedream_2bw",
            "microbatches": 3,
            "tied": True,
            "frozen": "mix",
            "correction": "predict",
            "clip": 3.0,
            "ema": 0.5,
        },
        "replicas, tied, frozen": {
            "num_stages": 2,
            "schedule": "pipedream",
            "microbatches": 4,
            "vertical_sync": True,
            "replicas": (1, 2),
            "placement": [[0], [1, 0]],
            "tied": True,
            "frozen": "track",
            "correction": 0.5,
        },
        "shared optimizer, corrected": {  # an evaluation needs what the other process knows of the prediction
            "num_stages": 2,
            "schedule": "pipedream_2bw",
            "microbatches": 4,
            "replicas": 2,
            "placement": [[0, 1], [0, 1]],
            "shard_optimizer": True,
            "correction": "predict",
        },
    },
    "2, more": {
        "data_parallel": {"num_stages": 1, "schedule": "pipedream_flush", "microbatches": 4, "replicas": 2, "clip": 3.0},
        "data_parallel, in parts": {"num_stages": 1, "schedule": "gpipe", "microbatches": 4, "replicas": 2, "sum_parts": 4},
        "3-1, in parts": {
            "num_stages": 2,
            "schedule": "pipedream_flush",
            "microbatches": 6,
            "replicas": (3, 1),
            "placement": [[0, 0, 1], [1]],
            "sum_parts": 2,
            "tied": True,
        },
        "2bw with chunks": {"num_stages": 4, "schedule": "pipedream_2bw", "microbatches": 3, "chunks_per_rank": 2, "clip": 3.0},
        "four_workers, clipped": {"num_stages": 2, "schedule": "pipedream_2bw", "microbatches": 6, "replicas": 2, "clip": 3.0},
        "float16": {"num_stages": 2, "schedule": "pipedream_2bw", "microbatches": 3, "params": "float16"},
        "four_workers": {"num_stages": 2, "schedule": "pipedream_2bw", "microbatches": 6, "replicas": 2, "placement": [[0, 1], [0, 1]]},
    },
    "2, schedules": {
        "naive": {"num_stages": 2, "schedule": "naive", "microbatches": 2},
        "gpipe": {"num_stages": 2, "schedule": "gpipe", "microbatches": 3, "clip": 3.0},
        "flush": {"num_stages": 2, "schedule": "pipedream_flush", "microbatches": 3},
        "pipedream": {"num_stages": 2, "schedule": "pipedream", "microbatches": 1},
        "interleaved": {"num_stages": 4, "schedule": "interleaved_1f1b", "microbatches": 3, "chunks_per_rank": 2},
        "breadth first": {"num_stages": 4, "schedule": "looped_bfs", "microbatches": 3, "chunks_per_rank": 2},
        "halves": {"num_stages": 2, "schedule": "zb_h1", "microbatches": 3},
        "halves, more in flight": {"num_stages": 2, "schedule": "zb_h2", "microbatches": 3},
        "halves, interleaved": {"num_stages": 4, "schedule": "interleaved_zero_bubble", "microbatches": 4, "chunks_per_rank": 2},
        "halves in another V": {"num_stages": 4, "schedule": "dualpipe_v", "microbatches": 4},
        "own order": {
            "num_stages": 2,
            "schedule": "auto_zero_bubble",
            "microbatches": 2,
            "order": ["F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 F1.1 B1.0 I1.1 W1.1"],
        },
    },
    "2, meshes": {
        "2bw, fsdp": {
            "num_stages": 2,
            "schedule": "pipedream_2bw",
            "microbatches": 2,
            "mesh": {"data": 2, "model": 2},
            "fsdp": True,
            "clip": 3.0,
        },
    },
    "2, more meshes": {
        "unlike": {
            "num_stages": 2,
            "schedule": "pipedream",
            "microbatches": 1,
            "mesh": [{"model": 2, "data": 2}, {"data": 4}],
            "stage_clip": 1.0,
        },
        "shared optimizer on meshes": {
            "num_stages": 2,
            "schedule": "gpipe",
            "microbatches": 4,
            "replicas": 2,
            "mesh": {"model": 2},
            "placement": [[0, 4], [2, 6]],
            "shard_optimizer": True,
        },
        "tied on meshes": {
            "num_stages": 2,
            "schedule": "pipedream_flush",
            "microbatches": 2,
            "mesh": {"data": 2, "model": 2},
            "tied": True,
        },
        "replicas on meshes": {
            "num_stages": 2,
            "schedule": "pipedream_2bw",
            "microbatches": 4,
            "replicas": 2,
            "mesh": {"model": 2},
            "placement": [[0, 4], [2, 6]],
        },
    },
    "4, more": {
        "2bw of 4": {"num_stages": 4, "schedule": "pipedream_2bw", "microbatches": 4},
        "pipedream of 4": {"num_stages": 4, "schedule": "pipedream", "microbatches": 1},
        "3-1": {"num_stages": 2, "schedule": "pipedream_2bw", "microbatches": 6, "replicas": (3, 1)},
    },
    "4, meshes": {
        "flush of 4 on meshes": {"num_stages": 4, "schedule": "pipedream_flush", "microbatches": 3, "mesh": {"model": 2}, "clip": 3.0},
        "2-1-1 on meshes": {
            "num_stages": 3,
            "schedule": "pipedream",
            "microbatches": 2,
            "replicas": (2, 1, 1),
            "mesh": [{"data": 2}, {"data": 2}, {"model": 2}],
        },
    },
    "4": {
        "vertical_sync of 4": {"num_stages": 4, "schedule": "pipedream", "microbatches": 2, "vertical_sync": True, "clip": 3.0},
        "2-1-1": {"num_stages": 3, "schedule": "pipedream", "microbatches": 2, "replicas": (2, 1, 1)},
    },
}
"""Cases by group; a group's name begins with the number of its processes. Without a placement each worker has its own device."""
INLINE = (
    *("2bw", "slices", "round_robin", "unlike", "sums in parts", "shared optimizer", "lengths", "agree rarely", "agree late"),
    "compressed sums",
)
"""Cases of two processes that run again as on GPUs: without threads, transfers called in the order of the program."""

BATCHES = 5
SHARES_GPU = "JPIPE_CHECK"  # the variable of `tests.on_gpu`
ROOT = Path(__file__).parents[2]


def inline(group: str) -> list[str]:
    """Return the cases of a group that run again as on GPUs; there all cases run so."""
    return [] if SHARES_GPU in os.environ else [case for case in INLINE if case in CASES[group]]


def pipeline(fields: dict):
    """Build a pipeline over the rich model, and batches for it."""
    import optax

    from jpipe import Pipeline, Plan, Precision
    from tests.jpipe import models
    from tests.jpipe.capabilities.slices import models as of_slices

    clip, stage_clip, ema, correction, frozen = (fields.pop(name, None) for name in ("clip", "stage_clip", "ema", "correction", "frozen"))
    params = fields.pop("params", "float32")
    precision = Precision(params=params, loss_scale="dynamic" if params == "float16" else None)
    tied, wide = fields.pop("tied", False), "mesh" in fields
    lengths = fields.pop("lengths", False)
    stack = models.wide_stack(tied) if wide else models.tied_stack() if tied else models.rich_stack()
    stack = models.sequence_stack() if lengths else of_slices.stack() if "slices" in fields else stack
    plan = Plan.even(stack.ids, **fields)
    sizes = {"rows": 4, "width": 4} if wide else {}
    options = {"clip_global_norm": clip, "clip_stage_norm": stage_clip, "ema_decay": ema, "precision": precision}
    optimizer = models.momentum()
    if frozen is not None:
        labels = {layer_id: "frozen" if layer_id == frozen else "trained" for layer_id in stack.ids}
        optimizer = optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)
    pipe = Pipeline(stack, plan, models.masked_squares, optimizer, delay_correction=correction, **options)
    if lengths:
        return pipe, models.sequences(BATCHES, plan.microbatches)
    if "slices" in fields:
        return pipe, of_slices.masked_batches(BATCHES, plan.microbatches)
    return pipe, models.masked_batches(BATCHES, plan.microbatches, **sizes)


def train(fields: dict) -> dict[str, np.ndarray]:
    """Return every number of a run by name: losses, weights, norms, evaluations, and the parameters of this process's layers.

    In the last of several processes a step is interrupted and called again, as after Ctrl-C in a notebook; the others do not notice.
    """
    import jax

    pipe, batches = pipeline(dict(fields))
    state, numbers = pipe.init(jax.random.key(7), batches[0], buckets=batches), {}
    for t, batch in enumerate(batches):
        if t == 1 and jax.process_index() == jax.process_count() - 1 > 0:
            with contextlib.suppress(KeyboardInterrupt):
                pipe.step(state, batch, observe=interrupt)
                raise AssertionError("the step was to be interrupted")
        state, metrics = pipe.step(state, batch)
        numbers |= numbers_of(metrics)
        if t == 2:
            numbers |= {f"{name} in flight": number for name, number in evaluated(pipe, state, batches[1]).items()}
            numbers |= {f"{name} in flight": float(norm) for name, norm in pipe.delay_norms(state)._asdict().items()}
            numbers |= predicted(pipe, state, batches[1])
            if pipe.ema_decay is not None:
                numbers["loss of the average"] = float(pipe.evaluate(state, batches[0], weights="ema").loss)
    state, metrics = pipe.drain(state, with_metrics=True)
    numbers |= numbers_of(metrics)
    numbers |= {f"{name} at the end": number for name, number in evaluated(pipe, state, batches[0]).items()}
    row = jax.tree.map(lambda leaf: leaf[:1], batches[0])  # one microbatch: further replicas of the last stage evaluate nothing
    numbers["loss of a row"] = float(pipe.evaluate(state, row).loss)
    for layer_id, params in pipe.params(state).items():
        numbers |= {f"{layer_id}{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(params)}
    for w, worker in zip(pipe._executor.stages, state.workers, strict=True):
        for path, leaf in jax.tree.leaves_with_path(worker.layer_state):
            numbers[f"state of worker {w}{jax.tree_util.keystr(path)}"] = leaf
    return {name: np.asarray(value) for name, value in numbers.items()}


def interrupt(event) -> None:
    """Raise what Ctrl-C raises, at the first instruction of a step."""
    raise KeyboardInterrupt


def numbers_of(metrics) -> dict[str, float]:
    """Return the numbers of each batch by name."""
    return {f"{name} {batch}": float(number) for name, numbers in metrics._asdict().items() for batch, number in numbers.items()}


def evaluated(pipe, state, batch) -> dict[str, float]:
    from tests.jpipe import models

    evaluation = pipe.evaluate(state, batch, {"close": models.close, "loss again": models.masked_squares})
    numbers = {f"{part} of {name}": number for name, mean in evaluation.metrics.items() for part, number in mean._asdict().items()}
    numbers |= {"loss": evaluation.loss, "weight": evaluation.weight, "version": evaluation.version}
    assert (float(evaluation.metrics["loss again"].mean), float(evaluation.metrics["loss again"].weight)) == (
        float(evaluation.loss),
        float(evaluation.weight),
    )
    assert sum(float(weight) for _, weight in evaluation.microbatches["loss again"]) == float(evaluation.weight)
    return {name: float(number) for name, number in numbers.items()}


def predicted(pipe, state, batch) -> dict[str, np.ndarray]:
    """Return the outputs for all rows but the last: in all processes, and in the first."""
    import jax

    inputs = jax.tree.map(lambda leaf: leaf[:-1], batch[0])
    outputs, of_first = pipe.predict(state, inputs), pipe.predict(state, inputs, to="first")
    assert (of_first is None) == (jax.process_index() != 0)
    assert of_first is None or of_first.tobytes() == outputs.tobytes()
    return {"outputs": outputs}


def refusal() -> str:
    """Return the error message for a plan of one worker."""
    import jax

    from jpipe import InputError

    pipe, batches = pipeline({"num_stages": 1, "schedule": "naive", "microbatches": 1})
    try:
        pipe.init(jax.random.key(7), batches[0])
    except InputError as error:
        return str(error)
    return ""


def disagreement() -> str:
    """Return the error message for a different mesh in each process."""
    import jax

    from jpipe import InputError

    mesh = {"data": 2, "model": 2} if jax.process_index() else {"data": 4}
    pipe, batches = pipeline({"num_stages": 2, "schedule": "gpipe", "microbatches": 1, "mesh": mesh})
    try:
        pipe.init(jax.random.key(7), batches[0])
    except InputError as error:
        return str(error)
    return ""


def differ(file: str) -> None:
    """Save the error messages when process 1 passes other arguments to `init`, and from batch 3 on other batches to `step`."""
    import jax

    from jpipe import InputError

    fields, other = dict(CASES["2"]["2bw"]), jax.process_index() == 1
    errors = {}
    for name, changed, seed, rows in (("clip", {"clip": 2.0}, 7, 1), ("key", {}, 8, 1), ("rows", {}, 7, 2)):
        pipe, batches = pipeline(fields | (changed if other else {}))
        batch = jax.tree.map(lambda leaf: leaf.repeat(rows if other else 1, axis=0), batches[0])  # noqa: B023 - called at once
        try:
            pipe.init(jax.random.key(seed if other else 7), batch)
        except InputError as error:
            errors[name] = str(error)
    pipe, batches = pipeline(fields)
    state = pipe.init(jax.random.key(7), batches[0])
    try:
        for t in range(1000):
            state, metrics = pipe.step(state, batches[0 if other and t >= 3 else t % BATCHES])
            for loss in metrics.losses.values():
                float(loss)
    except InputError as error:
        errors["step"], errors["at"] = str(error), t
    np.savez(file, **{name: np.asarray(text) for name, text in errors.items()})
    raise InputError("nobody catches this")


def save_copies(folder: Path) -> dict[str, np.ndarray]:
    """Save a run with shared parameters, and again after one copy has changed. Returns the checkpoints and the error message."""
    import jax

    from jpipe import checkpoints
    from jpipe.runtime import CopiesDiffer

    pipe, batches = pipeline(dict(CASES["2"]["tied"]))
    state, reported = pipe.init(jax.random.key(7), batches[0]), ""
    for at in (2, 4):
        if at == 4 and jax.process_index() == 1:
            newest = state.workers[0].weights.read(state.workers[0].weights.newest)
            newest["noise shared w"] = newest["noise shared w"] + 1
        for batch in batches[at - 2 : at]:
            state, _ = pipe.step(state, batch)
        try:
            pipe.save(folder, state)
        except CopiesDiffer as error:
            reported = str(error)
    return {"copies": np.asarray(reported), "saved": np.asarray(checkpoints.steps(folder))}


def train_all(group: str, count: int, file: str) -> None:
    from jpipe.runtime import _executor

    transport, in_order = _executor.Transport, functools.partial(_executor.Transport, threads=False)
    numbers: dict[str, np.ndarray] = {}

    def train_each(cases: Iterable[str], name: str = "") -> None:
        for case in cases:
            print(f"case {name}{case}", flush=True)
            numbers.update({f"{name}{case}: {key}": value for key, value in train(CASES[group][case]).items()})

    _executor.Transport = in_order if SHARES_GPU in os.environ else transport
    train_each(CASES[group])
    if count > 1:
        numbers["refused"] = np.asarray(refusal())
        numbers |= {"disagreed": np.asarray(disagreement())} if group == "2, meshes" else {}
        numbers |= save_copies(Path(file).parent) if "tied" in CASES[group] else {}
        _executor.Transport = in_order
        train_each(inline(group), "inline ")
    np.savez(file, **numbers)


def train_whole_model() -> dict[str, np.ndarray]:
    """Return the numbers of a run of layers that were cut from a model with a shared parameter and dropout."""
    import jax
    import optax

    from examples.any_model import nnx_transformer
    from jpipe import InputError, LayerStack, Pipeline, Plan

    batch = nnx_transformer.batch(8, 0)
    stack = LayerStack.from_model(lambda rngs: nnx_transformer.model(2, rngs=rngs), batch[0][:2])
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "pipedream_2bw", 4), nnx_transformer.loss, optax.adam(1e-2))
    state, numbers = pipe.init(jax.random.key(7), batch), {}
    for _ in range(3):
        state, metrics = pipe.step(state, batch)
        numbers |= numbers_of(metrics)
    state = pipe.drain(state)
    numbers["evaluation"] = float(pipe.evaluate(state, batch).loss)
    params = jax.tree_util.tree_leaves_with_path(pipe.params(state))
    numbers |= {jax.tree_util.keystr(path): leaf for path, leaf in params if not isinstance(leaf, jax.ShapeDtypeStruct)}
    if jax.process_count() > 1:
        try:
            pipe.model(state)
        except InputError as error:
            numbers["no model"] = str(error)
    return {name: np.asarray(value) for name, value in numbers.items()}


def train_endlessly(file: str) -> None:
    """Train until killed, and write FILE when the pipeline is in steady state."""
    import jax

    pipe, batches = pipeline(dict(CASES["2"]["2bw"]))
    state = pipe.init(jax.random.key(7), batches[0])
    for t in range(10**9):
        state, _ = pipe.step(state, batches[t % BATCHES])
        if t == 10:
            Path(file).touch()


def main(what: str, group: str, address: str, count: int, index: int, file: str) -> None:
    shares_gpu, cores = SHARES_GPU in os.environ, sorted(os.sched_getaffinity(0))
    if not shares_gpu:
        os.sched_setaffinity(0, {cores[index % len(cores)]})  # with other numbers of threads, XLA's sums may differ in the last bit
    if (count, index) == (2, 1):
        atexit.register(time.sleep, 1.0)  # the last one called: all others are gone by then
    import jax

    if os.environ.get(SHARES_GPU) != "gpu":
        jax.config.update("jax_disable_most_optimizations", True)  # it compiles twice as fast
    if shares_gpu and count == 1:
        from tests import on_gpu

        on_gpu.share_device()
    # The cases and the tests have much in common. Only process 0 of a run writes into its cache.
    cache = os.environ.get("XDG_CACHE_HOME", str(Path(file).parent))
    jax.config.update("jax_compilation_cache_dir", f"{cache}/several {count}.{index}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    devices = 8 if "meshes" in group else 1 if count > 1 or shares_gpu else 4
    jax.config.update("jax_num_cpu_devices", devices // count if "meshes" in group else devices)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, count, index)
    if what == "endless":
        train_endlessly(file)
    if what == "differ":
        differ(file)
    if what == "whole":
        return np.savez(file, **train_whole_model())
    train_all(group, count, file)
    if (count, index) == (4, 1):
        raise ValueError("nobody catches this")


@contextlib.contextmanager
def started(what: str, group: str, count: int, folder: Path) -> Iterator[list[subprocess.Popen]]:
    """Start `count` processes of this program that write to FOLDER/COUNT.INDEX.npz and .txt, and kill them on exit."""
    traced = os.environ | {"PYTHONFAULTHANDLER": "1"}  # a process that crashes prints where
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    program = [sys.executable, "-m", "tests.jpipe.several", what, group, address, str(count)]
    processes = []
    try:
        for index in range(count):
            with open(folder / f"{count}.{index}.txt", "w") as log:
                command = [*program, str(index), str(folder / f"{count}.{index}.npz")]
                environment = traced | {"NCCL_HOSTID": str(index)}  # NCCL connects processes on one GPU only if their hosts differ
                processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
