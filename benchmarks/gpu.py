"""`python -m benchmarks.gpu`: compare a GPT of 352 million parameters in bf16 as four stages on one GPU and as one jitted step.

They run in turn. Model FLOPs utilization is the model's FLOPs per second (6 for each weight and token, plus the attention), divided by the
peak of the GPU. With `--memory` the pipeline alone runs, and its memory is compared with what `jpipe.simulate` predicts; `--offload` lets
parts of its state wait in host memory, and moves between both memories are timed. `--tiny` runs the program on any device, to check that
it works.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jpipe
from benchmarks import gpt
from benchmarks.machine import describe
from benchmarks.pipelines import Runner
from benchmarks.programs import steps_per_second
from benchmarks.serve import step_by_step
from benchmarks.sizes import GPU, TINY, Sizes

GOAL = 0.97
PLAIN = "one jitted step"
_PARTS = "optimizer", "versions", "residuals", "stash"
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""FLOP/s of dense bf16 products, from the vendors' data sheets; the first name that is part of the device's name is used."""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print.

    Args:
        arguments: of the command line, by default those of this process.

    Returns:
        The exit code: 2 without a GPU and `--tiny`.
    """
    options = _options(arguments)
    machine = describe()
    if machine["platform"] != "gpu" and not options.tiny:
        print(f"bench-gpu: expected a GPU, found {machine['device']} only; install JAX for it, or try --tiny", file=sys.stderr)
        return 2
    sizes = dataclasses.replace(TINY if options.tiny else GPU, attention=options.attention)
    if options.rows is not None:
        sizes = dataclasses.replace(sizes, rows=options.rows)
    peak = options.peak or next((flops for name, flops in PEAKS.items() if name in machine["device"]), None)
    print(f"{machine['device']}, jax {machine['jax']}: {sizes.parameters / 1e6:.1f} million parameters, {sizes.compute_dtype},")
    print(f"{options.microbatches} microbatches of {sizes.rows} sequences of {sizes.sequence} tokens, attention {sizes.attention}")
    if options.memory:
        figures = _measure_memory(_pipeline(sizes, options, options.recompute[0]), gpt.data(sizes, options.microbatches))
        figures |= _time_moves(1 << 20 if options.tiny else 1 << 30) if options.offload else {}
        print("\n".join(f"{name:<70} {value}" for name, value in figures.items()))
    else:
        figures = _measure_throughput(sizes, options, peak)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n", encoding="utf-8")
    return 0


def _measure_throughput(sizes: Sizes, options: argparse.Namespace, peak: float | None) -> dict[str, dict[str, float]]:
    """Measure and print the throughput of the programs, and return it by program and figure."""
    rates, figures = _rates(_programs(sizes, options), sizes, options), dict[str, dict[str, float]]()
    for name, measured in rates.items():
        rate = statistics.median(measured)
        share = f"{rate * sizes.sequence_flops / peak:.1%}" if peak else "not known: give --peak, in FLOP/s"
        print(f"{name:<50} {rate:10.2f} sequences/s, model FLOPs utilization {share}")
        figures[name] = {"sequences/s": rate} | ({"model FLOPs utilization": rate * sizes.sequence_flops / peak} if peak else {})
    for name in [name for name in rates if name != PLAIN]:
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates[PLAIN], strict=True))
        print(f"{name} ÷ {PLAIN}: {ratio:.3f} (goal at least {GOAL}: {'met' if ratio >= GOAL else 'missed'})")
        figures[name]["of the jitted step"] = ratio
    return figures


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", default="pipedream_flush", choices=list(_schedules()), help="default: %(default)s")
    parser.add_argument("--stages", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=16, help="of a batch (default: %(default)s)")
    parser.add_argument("--rows", type=int, help=f"sequences of a microbatch (default: {GPU.rows})")
    policies = jpipe.plan.RECOMPUTE
    parser.add_argument("--recompute", nargs="+", default=["auto"], choices=policies, help="in the pipelines, one for each (default: auto)")
    parser.add_argument("--attention", default="xla", choices=["xla", "cudnn"], help="its implementation (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of a round, the first not timed (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--peak", type=float, help="peak FLOP/s of the GPU, if this program does not know it")
    parser.add_argument("--memory", action="store_true", help="run the pipeline alone, and compare its memory with the prediction")
    parser.add_argument("--offload", nargs="*", default=[], choices=[*_PARTS], help="what waits in host memory, of all stages")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--json", type=pathlib.Path, help="the file for the figures (default: none)")
    return parser.parse_args(arguments)


def _schedules() -> Iterator[str]:
    """Return the schedules with one stage per rank whose order is not data of the plan."""
    for name, rules in jpipe.schedules.SCHEDULES.items():
        if rules.layout != "v" and "order" not in rules.options:
            yield name


def _pipeline(sizes: Sizes, options: argparse.Namespace, recompute: str) -> jpipe.Pipeline:
    """Return the pipeline, with all stages on the first device."""
    stack = gpt.stack(sizes)
    offload = dict.fromkeys(options.offload, "all") or None
    plan = jpipe.Plan.even(stack.ids, options.stages, options.schedule, options.microbatches, recompute=recompute, offload=offload)
    return jpipe.Pipeline(stack, plan, gpt.summed_loss, gpt.optimizer(), [jax.devices()[0]] * options.stages)


def _programs(sizes: Sizes, options: argparse.Namespace) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Return the pipelines and the plain step, compiled, by name; each runs a number of steps."""
    batch = gpt.data(sizes, options.microbatches)
    programs: dict[str, Callable[[int], dict[str, Any]]] = {}
    for recompute in options.recompute:
        name = f"{options.stages} stages, {options.schedule}, recompute {recompute}"
        programs[name] = Runner(_pipeline(sizes, options, recompute), batch)
    programs[PLAIN] = step_by_step(gpt.PlainStep(sizes, options.microbatches, jax.device_put(batch, jax.devices()[0])))
    for program in programs.values():
        program(2)  # compiles everything that is not compiled yet
    return programs


def _rates(programs: dict[str, Callable[[int], dict[str, Any]]], sizes: Sizes, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure sequences per second of each program, round by round."""
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.rounds):
        for name, program in programs.items():
            rates[name].append(steps_per_second([program(options.steps)["ends"]]) * sizes.rows * options.microbatches)
    return rates


def _measure_memory(pipe: jpipe.Pipeline, batch: Any) -> dict[str, float]:
    """Run a few steps. Return the memory of the device and of the host, beside the prediction for all ranks together, and times."""
    state, most, in_host = pipe.init(jax.random.key(0), batch), 0, 0

    def observe(event: jpipe.runtime.Event) -> None:
        nonlocal most, in_host
        alive = [array for array in jax.live_arrays() if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)]
        total = sum(array.nbytes for array in alive)
        there = sum(array.nbytes for array in alive if array.sharding.memory_kind == "pinned_host")
        most, in_host = max(most, total - there), max(in_host, there)

    for _ in range(2):
        state, metrics = pipe.step(state, batch, observe=observe)
    jax.block_until_ready(pipe.drain(state, observe=observe))
    costs = pipe.costs(batch)
    predicted = jpipe.simulate(jpipe.lower(pipe.plan, 3), costs)
    figures = {
        "GB of arrays alive at a time, the most": most / 1e9,
        "GB, predicted peaks of all ranks in sum": sum(predicted.held_bytes) / 1e9,
        "GB in host memory at a time, the most": in_host / 1e9,
        "GB in host memory, predicted": sum(predicted.host_bytes) / 1e9,
    }
    if peak := (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
        figures["GB, peak of the allocator"] = peak / 1e9
        figures["GB of scratch memory of the largest program"] = max(cost.temporary for cost in costs) / 1e9
    figures["mean loss of the second batch"] = [float(loss) for loss in metrics.losses.values()][-1]
    del state, metrics
    runner = Runner(pipe, batch)
    runner(2)
    figures["seconds of a batch"] = statistics.median(1 / steps_per_second([runner(4)["ends"]]) for _ in range(3))
    return figures


def _time_moves(size: int) -> dict[str, float]:
    """Time moves of an array of this many bytes to host memory and back."""
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array, seconds = jnp.zeros(size, jnp.uint8, device=on_device), {"to": list[float](), "from": list[float]()}
    for _ in range(6):
        for direction, target in (("to", on_device.with_memory_kind("pinned_host")), ("from", on_device)):
            begin = time.perf_counter()
            array = jax.block_until_ready(jax.device_put(array, target))
            seconds[direction].append(time.perf_counter() - begin)
    return {f"GB/s {direction} host memory": size / statistics.median(times[1:]) / 1e9 for direction, times in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
