"""`python -m benchmarks.gpu`: compare a GPT of 352 million parameters in bf16 as four stages on one GPU and as one jitted step.

Both run in turn. Model FLOPs utilization is the model's FLOPs per second (6 for each weight and token, plus the attention), divided by the
peak of the GPU. `--tiny` runs the program on any device, to check that it works.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jpipe
from benchmarks import gpt
from benchmarks.machine import describe
from benchmarks.pipelines import Runner
from benchmarks.programs import steps_per_second
from benchmarks.serve import step_by_step
from benchmarks.sizes import GPU, TINY, Sizes

GOAL = 0.97
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
    print(f"{options.microbatches} microbatches of {sizes.rows} sequences of {sizes.sequence} tokens")
    piped, plain = _measure(sizes, options)
    for name, rates in ((f"{options.stages} stages, {options.schedule}", piped), ("one jitted step", plain)):
        rate = statistics.median(rates)
        share = f"{rate * sizes.sequence_flops / peak:.1%}" if peak else "not known: give --peak, in FLOP/s"
        print(f"{name:<28} {rate:10.2f} sequences/s, model FLOPs utilization {share}")
    ratio = statistics.median(a / b for a, b in zip(piped, plain, strict=True))
    print(f"{options.stages} stages ÷ one step: {ratio:.3f} (goal at least {GOAL}: {'met' if ratio >= GOAL else 'missed'})")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", default="pipedream_flush", choices=list(_schedules()), help="default: %(default)s")
    parser.add_argument("--stages", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=16, help="of a batch (default: %(default)s)")
    parser.add_argument("--rows", type=int, help=f"sequences of a microbatch (default: {GPU.rows})")
    parser.add_argument("--recompute", default="none", choices=jpipe.plan.RECOMPUTE, help="in the pipeline (default: %(default)s)")
    parser.add_argument("--attention", default="xla", choices=["xla", "cudnn"], help="its implementation (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of a round, the first not timed (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--peak", type=float, help="peak FLOP/s of the GPU, if this program does not know it")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device")
    return parser.parse_args(arguments)


def _schedules() -> Iterator[str]:
    """Return the schedules with one stage per rank whose order is not data of the plan."""
    for name, rules in jpipe.schedules.SCHEDULES.items():
        if rules.layout != "v" and "order" not in rules.options:
            yield name


def _measure(sizes: Sizes, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Measure sequences per second of the pipeline and of the plain step, round by round."""
    stack, batch = gpt.stack(sizes), gpt.data(sizes, options.microbatches)
    plan = jpipe.Plan.even(stack.ids, options.stages, options.schedule, options.microbatches, recompute=options.recompute)
    device = jax.devices()[0]
    pipeline = jpipe.Pipeline(stack, plan, gpt.summed_loss, gpt.optimizer(), [device] * options.stages)
    plain = gpt.PlainStep(sizes, options.microbatches, jax.device_put(batch, device))
    programs: tuple[Callable[[int], dict[str, Any]], ...] = Runner(pipeline, batch), step_by_step(plain)
    rates: tuple[list[float], list[float]] = [], []
    for program in programs:
        program(2)  # compiles everything that is not compiled yet
    for _ in range(options.rounds):
        for program, rates_of_program in zip(programs, rates, strict=True):
            rates_of_program.append(steps_per_second([program(options.steps)["ends"]]) * sizes.rows * options.microbatches)
    return rates


if __name__ == "__main__":
    sys.exit(main())
