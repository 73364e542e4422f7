"""`python -m benchmarks.peers`: compare jpipe with PyTorch and plain JAX, with two workers of one core each, for m = 8 and m = 2.

The ceiling is two independent JAX jobs of one core each at the same time: the speed of two workers that never wait. Each program is
measured in turn with the ceiling, so a machine that gets slower or faster changes both; its share is the median over the rounds.
A schedule with `+1` has one more microbatch in flight (`extra_in_flight`), which hides the transfers. Interleaved and V-shaped schedules
have two stages on each worker.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
from typing import Any

import jax

from benchmarks.machine import describe
from benchmarks.peers.entries import CEILING_ENTRY, ENTRIES, STAGES, WORKERS, Entry, goals
from benchmarks.programs import Program, ProgramFailed, steps_per_second
from benchmarks.sizes import PEERS

CEILING_STEPS, STEPS = {8: 3, 2: 9}, {8: 6, 2: 16}  # the first one is not timed
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    # The settings of `jpipe.keep_freed_memory`, for all programs, including those of PyTorch.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}


def main() -> int:
    """Measure, print a table for each m, write JSON."""
    options = _options()
    cores = sorted(os.sched_getaffinity(0))[:WORKERS]
    if len(cores) < WORKERS:
        print(f"bench-peers: expected {WORKERS} cores to pin workers to, found {len(cores)}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"machine": describe(), "runs": []}
    print(f"{results['machine']['device']}, {WORKERS} of {results['machine']['cores']} cores, jax {results['machine']['jax']}")
    if not os.access(options.torch, os.X_OK):
        print(f"No PyTorch at {options.torch}: its rows are left out. `make bench-peers` sets it up; see TORCH and TORCH_INDEX there.")
        options.torch = None
    for microbatches in options.microbatches:
        rows = _Measurement(microbatches, cores, options).rows()
        _print(microbatches, rows)
        results["runs"].append({"microbatches": microbatches, "rows": rows})
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.json}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of programs, or the beginning of them; by default all")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 2], choices=sorted(STEPS), help="default: 8 2")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--torch", default=".venv-torch/bin/python", help="a Python that has PyTorch (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("benchmarks/peers.json"), help="default: %(default)s")
    return parser.parse_args()


class _Measurement:
    """The measurements for one m: the ceiling keeps running, and each program is measured in turn with it."""

    def __init__(self, microbatches: int, cores: list[int], options: argparse.Namespace) -> None:
        self.microbatches, self.cores, self.options = microbatches, cores, options

    def rows(self) -> list[dict[str, Any]]:
        names = tuple(self.options.names) or ("",)
        entries = [e for e in ENTRIES if e.name.startswith(names) and (self.options.torch or not e.is_torch)]
        entries = [e for e in entries if e.least_microbatches <= self.microbatches]
        with self._start(CEILING_ENTRY) as ceiling:
            parameters = ceiling.facts()[0]["parameters"]
            rows = []
            for entry in entries:
                print(f"… m = {self.microbatches}: {entry.name}", file=sys.stderr, flush=True)
                row: dict[str, Any] = {"name": entry.name}
                try:
                    row |= self._measure(entry, ceiling, parameters)
                except ProgramFailed as failure:
                    row["failed"] = str(failure)
                rows.append(row)
            return [*rows, self._imbalance()]

    def _start(self, entry: Entry) -> Program:
        python = self.options.torch if entry.is_torch else sys.executable
        return Program(entry.name, entry.commands(self.microbatches, python), self.cores[: entry.processes], ENVIRONMENT)

    def _measure(self, entry: Entry, ceiling: Program, parameters: int) -> dict[str, Any]:
        rates, bounds = [], []
        with self._start(entry) as program:
            facts = program.facts()
            if any(fact["parameters"] != parameters for fact in facts):
                raise ProgramFailed(f"{entry.name}: expected the model of {parameters} parameters, found {facts[0]['parameters']}")
            for _ in range(self.options.rounds):
                bounds.append(self._rate(CEILING_ENTRY, ceiling, CEILING_STEPS))
                rates.append(self._rate(entry, program, STEPS))
        return {
            "sequences_per_second": statistics.median(rates),
            "share_of_ceiling": statistics.median(rate / bound for rate, bound in zip(rates, bounds, strict=True)),
            "ceiling_beside": statistics.median(bounds),
            "shares": [rate / bound for rate, bound in zip(rates, bounds, strict=True)],
        }

    def _rate(self, entry: Entry, program: Program, steps: dict[int, int]) -> float:
        """Measure sequences per second."""
        answers = program.run(steps[self.microbatches])
        rate = steps_per_second([answer["ends"] for answer in answers]) * PEERS.rows * self.microbatches
        return rate / entry.processes if entry.together else rate

    def _imbalance(self) -> dict[str, Any]:
        with self._start(STAGES) as program:
            try:
                program.facts()
                (answer,) = program.run(STEPS[self.microbatches])
            except ProgramFailed as failure:
                return {"name": STAGES.name, "failed": str(failure)}
        return {"name": STAGES.name, "stage_seconds": answer["stage_seconds"]}


def _print(microbatches: int, rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if "share_of_ceiling" in row]
    shares = {row["name"]: row["share_of_ceiling"] for row in measured}
    print(f"\nm = {microbatches}, the same {PEERS.parameters:,} parameters in all programs")
    print(f"{'program':<28} {'sequences/s':>12} {'÷ ceiling':>10} {'of':>8}")
    for row in measured:
        print(f"{row['name']:<28} {row['sequences_per_second']:>12.2f} {row['share_of_ceiling']:>10.3f} {row['ceiling_beside']:>8.2f}")
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:<28} not measured: {row['failed']}")
        if times := row.get("stage_seconds"):
            balance = sum(times) / len(times) / max(times)
            milliseconds = " and ".join(f"{time * 1e3:.1f} ms" for time in times)
            print(f"{row['name']:<28} {milliseconds} per microbatch: balance {balance:.3f}")
    print(f"\n{'goal':<58} {'at least':>9} {'found':>8}")
    for text, least, measured in goals(microbatches, shares):
        print(f"{text:<58} {least:>9.3f} {measured:>8.3f}  {'met' if measured >= least else 'MISSED'}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
