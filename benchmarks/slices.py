"""`python -m benchmarks.slices`: measure rows in slices.

`throughput`: two stages of a flush in two processes, each pinned to a core; rows in four slices beside whole rows. `padded`: one program
for all slices beside one for each. `long`: the memory of a process that trains a small GPT on rows of 32,768 tokens, in slices and whole.
"""

import argparse
import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

import jpipe
from benchmarks import parts
from benchmarks.pipelines import Runner, fitted_costs
from benchmarks.planner.markdown import print_table
from benchmarks.programs import Program, free_port, python_module, steps_per_second
from benchmarks.serve import serve
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import layers
from jpipe_train.losses.cross_entropy import loss

MODELS = {
    "throughput": ModelConfig(depth=4, width=256, heads=8, seq_len=1024),
    "long": ModelConfig(depth=2, width=64, heads=1, head_size=8, mlp_width=1024, seq_len=32768),  # attention takes most of the time
}
BOUNDS, GOALS = {1: 8 / 5, 2: 4 / 3}, {1: 1.4, 2: 1.2}  # by the number of microbatches, for four slices on two stages
LINK = jpipe.Link(2e9, 2e-4)  # between two processes here, as in benchmarks/data/communication.json
STEPS, ROUNDS = 6, 3


def pipeline(name: str, microbatches: int, slices: Any) -> tuple[jpipe.Pipeline, Any]:
    """Return a pipeline of two stages, or of four for long rows, and a batch with a row for each microbatch."""
    stack, config = layers.layers(MODELS[name], 1024 if name == "long" else None), MODELS[name]
    plan = jpipe.Plan.even(stack.ids, 4 if name == "long" else 2, "pipedream_flush", microbatches, slices=slices)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (microbatches, config.seq_len + 1)).astype(np.int32)
    return jpipe.Pipeline(stack, plan, loss, optax.adamw(1e-3)), (tokens[:, :-1], tokens[:, 1:])


def process(name: str, microbatches: int, slices: int, number: int, count: int, port: int) -> None:
    """Run one of `count` processes: print its facts, and then run the steps that standard input requests."""
    jpipe.keep_freed_memory()  # as `jpipe train` does
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    pipe, batch = pipeline(name, microbatches, slices)
    if name == "long":
        state, held, losses, began = pipe.init(jax.random.key(0), batch), _Peak(), list[float](), time.perf_counter()
        steps = 1 if slices == 1 else 2
        for _ in range(steps):
            state, metrics = pipe.step(state, batch, observe=held)
            losses += map(float, metrics.losses.values())  # waits for the step
        seconds, peak = (time.perf_counter() - began) / steps, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        predicted = _predicted(pipe, batch).held_bytes
        serve(lambda steps: {}, predicted=predicted, held=held.bytes, peak=peak, seconds=seconds, losses=losses)
    elif count == 1:
        serve(lambda steps: {"costs": [dataclasses.asdict(cost) for cost in fitted_costs(pipe, batch, steps)]})
    else:
        runner = Runner(pipe, batch)
        runner(3)
        peak = _Peak()
        runner(2, peak)
        rank = pipe.plan.rank_of[number]
        serve(runner, held=peak.bytes, predicted=_predicted(pipe, batch).held_bytes[rank])


def _predicted(pipe: jpipe.Pipeline, batch: Any) -> jpipe.programs.Prediction:
    costs = pipe.costs(batch)
    return jpipe.simulate(jpipe.lower(pipe.plan, 2, **jpipe.programs.uses_by_costs(costs)), costs)


class _Peak:
    """An observer of the largest sum of the bytes of all arrays after an instruction."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, event: Any) -> None:
        self.bytes = max(self.bytes, sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted()))


def throughput(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure throughput and memory of four slices beside whole rows, for one and for two microbatches."""
    return [_compared(microbatches, 4) for microbatches in (1, 2)]


def _compared(microbatches: int, slices: int) -> dict[str, Any]:
    seconds = {each: _simulated(microbatches, each) for each in (1, slices)}
    rates, facts = dict[int, list[float]](), dict[int, list[dict[str, Any]]]()
    with _started("throughput", microbatches, 1, 2) as whole, _started("throughput", microbatches, slices, 2) as cut:
        programs: Mapping[int, Program] = {1: whole, slices: cut}
        for each, program in programs.items():
            facts[each], rates[each] = program.facts(), []
        for _ in range(ROUNDS):
            for each, program in programs.items():
                rates[each].append(steps_per_second([answer["ends"] for answer in program.run(STEPS)]) / 2)
    ratios = [cut / whole for whole, cut in zip(rates[1], rates[slices], strict=True)]
    memory = [fact["held"] / fact["predicted"] for fact in facts[slices]]
    row = {
        "microbatches": microbatches,
        "slice_ms": 1e3 * seconds[slices][1],
        "rounds": ratios,
        "measured": statistics.median(ratios),
        "simulated": seconds[1][0] / seconds[slices][0],
        "seconds": {each: [1 / statistics.median(rates[each]), seconds[each][0]] for each in rates},
        "memory": memory,
        "held": {each: [fact["held"] for fact in of_process] for each, of_process in facts.items()},
    }
    head = (
        "microbatches",
        "forward of a slice",
        "slices ÷ whole rows, measured",
        "simulated",
        "goal",
        "bound",
        "arrays held ÷ predicted",
    )
    ratio, of_memory = f"{row['measured']:.2f}", ", ".join(f"{each:.3f}" for each in memory)
    shown = str(microbatches), f"{row['slice_ms']:.0f} ms", ratio, f"{row['simulated']:.2f}"
    print_table(head, [(*shown, f"{GOALS[microbatches]:g}", f"{BOUNDS[microbatches]:.2f}", of_memory)])
    return row


def _simulated(microbatches: int, slices: int) -> tuple[float, float]:
    """Return the simulated seconds of a batch with measured times, and the mean time of a forward."""
    with _started("throughput", microbatches, slices, 1) as program:
        program.facts()
        costs = [_cost(fields) for fields in program.run(STEPS)[0]["costs"]]
    plan = pipeline("throughput", microbatches, slices)[0].plan
    return jpipe.simulate(jpipe.lower(plan, 1), costs, LINK).seconds, statistics.fmean(cost.forward for cost in costs)


def _cost(fields: dict[str, Any]) -> jpipe.programs.StageCost:
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return jpipe.programs.StageCost(**{**fields, **tuples, "by_slice": tuple(map(_cost, fields["by_slice"])), "passed": ()})


def padded(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure forwards and backwards of a stage for all slices of a row: with a program for each slice, and with one for all.

    The one program has keys and values for the positions of whole rows, writes a slice into them, and masks later slices.
    """
    config, draw = MODELS["throughput"], np.random.default_rng(0)
    heads, size, rows = config.heads, config.width // config.heads, []

    def array(*shape: int) -> jax.Array:
        return jax.numpy.asarray(draw.normal(size=shape, scale=0.05), jax.numpy.float32)

    params = [
        {"qkv": array(3, heads, config.width, size), "out": array(config.width, config.width), "up": array(config.width, 4 * config.width)}
        for _ in range(config.depth // 2)
    ]

    def stage(params: Any, x: Any, carry: Any, start: Any) -> Any:
        left = []
        for layer, before in zip(params, carry, strict=True):
            q, *new = jax.numpy.einsum("bsw,nhwd->nbshd", x, layer["qkv"])
            if isinstance(start, int):
                keys, values = (jax.numpy.concatenate(parts, 1) for parts in zip(before, new, strict=True))
            else:
                keys, values = (jax.lax.dynamic_update_slice_in_dim(*parts, start, 1) for parts in zip(before, new, strict=True))
            mask = jax.numpy.arange(keys.shape[1])[None] <= start + jax.numpy.arange(x.shape[1])[:, None]
            x = x + jax.nn.dot_product_attention(q, keys, values, mask=mask[None, None]).reshape(x.shape) @ layer["out"]
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["up"].T
            left.append((keys, values))
        return x, left

    def passes(params: Any, x: Any, carry: Any, start: Any) -> Any:
        (y, left), pull = jax.vjp(lambda *arguments: stage(*arguments, start), params, x, carry)
        return left, pull((y, left))

    def seconds(program: Any, slices: int, room: int) -> float:
        """Return the time of all slices of a row; the carry before the first has `room` positions."""
        carry: Any = [(array(1, room, heads, size),) * 2 for _ in params]
        x, began = array(1, config.seq_len // slices, config.width), time.perf_counter()
        for n in range(slices):
            carry, gradients = program(params, x, carry, n * x.shape[1])
            jax.block_until_ready(gradients)
        return time.perf_counter() - began

    for slices in (2, 4, 8):
        programs = (jax.jit(passes, static_argnums=3), 0), (jax.jit(passes), config.seq_len)
        with_compilation, *rounds = ([seconds(program, slices, room) for program, room in programs] for _ in range(12))
        ratio = statistics.median(padded / apart for apart, padded in rounds)
        rows.append({"slices": slices, "ratio": ratio, "rounds": rounds, "with_compilation": with_compilation})
    head = "slices of a row", "padded ÷ one for each slice", "compilation and first row, one for each slice", "padded"
    print_table(head, [(str(row["slices"]), f"{row['ratio']:.2f}", *(f"{each:.1f} s" for each in row["with_compilation"])) for row in rows])
    return rows


def long(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure memory, loss and time of a step on four rows of 32,768 tokens; of two steps in slices.

    Large blocks return to the system; `jpipe.keep_freed_memory` says why.
    """
    rows = []
    for slices in (1, 8):
        with _started("long", 4, slices, 1, MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_=str(2**20)) as program:
            (fact,) = program.facts(3600)
        rows.append({"slices": slices, **fact})
        sizes = [f"{size / 1e9:.2f} GB" for size in (fact["peak"], fact["held"], sum(fact["predicted"]))]
        head = "slices", "memory of the process", "arrays held", "predicted arrays", "losses", "time of a step"
        losses = ", ".join(f"{loss:.4f}" for loss in fact["losses"])
        print_table(head, [(str(slices), *sizes, losses, f"{fact['seconds']:.0f} s")])
    return rows


def _started(name: str, microbatches: int, slices: int, count: int, **environment: str) -> Program:
    """Start the processes of a pipeline, each pinned to a core."""
    port = free_port()
    commands = [python_module("benchmarks.slices", "process", name, microbatches, slices, n, count, port) for n in range(count)]
    return Program(f"{name} in {slices} slices", commands, range(count), {"JAX_PLATFORMS": "cpu", **environment})


if __name__ == "__main__":
    if sys.argv[1:2] == ["process"]:
        process(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        parser = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=__doc__)
        parts.run(parser, {"throughput": throughput, "padded": padded, "long": long}, "benchmarks/slices.json", None)
