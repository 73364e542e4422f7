"""Predict the throughput of `benchmarks.gpu` on an H100 that is not here, from counted operations and from compiled programs."""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jpipe
from benchmarks import gpt
from benchmarks.planner.markdown import print_table
from benchmarks.sizes import GPU
from jpipe.context import tracing_for
from jpipe_planner import Device, Profile, analyze
from jpipe_planner.cost.rooflines import find_programs, find_whole
from jpipe_planner.machine.compiling import compiling_for

TARGET, STAGES, MICROBATCHES = "h100-80gb", 4, 16
MEASURED = {"one jitted step": 152.3, "elementwise": 135.7, "none": 109.7}
"""Sequences per second on an H100, by recomputation (docs/explanation/gpu.md)."""
ROWS = (2, GPU.rows)


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile, print and return the sequences per second.

    Args:
        options: `layers`: blocks; None: those of the benchmark. `attention`.
    """
    device = Device(target=TARGET)
    compiling = compiling_for(device, 1, unlimited=True)
    if compiling.missing:
        print(f"{TARGET}: {compiling.missing}")
        return []
    sizes = dataclasses.replace(GPU, layers=options.layers or GPU.layers, attention=options.attention)
    stack, loss, rule = gpt.stack(sizes), gpt.summed_loss, gpt.optimizer()

    def batch(rows: int) -> tuple[Any, Any]:
        tokens = jax.ShapeDtypeStruct((rows, sizes.sequence), jnp.int32)
        return tokens, tokens

    whole = jpipe.Plan(schedule="gpipe", microbatches=MICROBATCHES, stages=[{"layers": stack.ids}])
    plans = {"one jitted step": whole}
    for policy in ("elementwise", "none"):
        plans[policy] = jpipe.Plan.even(stack.ids, STAGES, "pipedream_flush", MICROBATCHES, recompute=policy)
    rows, programs = MICROBATCHES * sizes.rows, dict[Any, Any]()
    profile = analyze(stack, batch, loss, rule, ROWS, device, policies=("none", "elementwise"))
    counted = analyze(stack, batch, loss, rule, ROWS, device.model_copy(update={"target": None}), policies=("none", "elementwise"))
    found = []
    with tracing_for(compiling.devices[0].platform):
        for name, plan in plans.items():
            pipe = jpipe.Pipeline(stack, plan, loss, rule)
            if plan is whole:
                seconds = find_whole(pipe, batch(rows), device, compiling).total("seconds")
            else:
                seconds = sum(one.total("seconds") for one in find_programs(pipe, batch(rows), device, compiling, programs))
            of_profiles = {"counted": _seconds(counted, plan, sizes.rows), "compiled layers": _seconds(profile, plan, sizes.rows)}
            rates = {kind: rows / taken for kind, taken in {**of_profiles, "compiled stages": seconds}.items()}
            found.append({"program": name, "measured": MEASURED[name], **rates})
            print(found[-1], flush=True)
    print_table(tuple(found[0]), [tuple(value if isinstance(value, str) else f"{value:.1f}" for value in row.values()) for row in found])
    return found


def _seconds(profile: Profile, plan: jpipe.Plan, rows: int) -> float:
    """Return the seconds of all computations of a batch, which take turns on one GPU."""
    costs = profile.stage_costs(plan, rows)
    return sum(plan.microbatches * (cost.forward + cost.backward) + cost.update for cost in costs)
