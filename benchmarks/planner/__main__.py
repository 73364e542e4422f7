"""`python -m benchmarks.planner [NAME ...]` with options: print tables, write JSON.

`speed` times the searches, `choice` compares the chosen plan with other candidates and with plans near it, `here` trains on this machine
and compares measurements with predictions, `measured` runs plans of different kinds in one process and in two, `targets` compiles stages
for devices that are not here, `rooflines` predicts their least time there, `absent` compares this with profiles and with measurements,
`recipes` predicts the memory and the throughput of configs/recipes. `benchmarks.papers` has the papers' experiments.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import parts
from benchmarks.planner import absent, choice, here, measured, recipes, rooflines, speed, targets
from jpipe_planner.machine.targets import known_targets
from jpipe_train.assemble.build import force_cpu_devices

PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "speed": lambda _: speed.main(),
    "choice": choice.main,
    "here": lambda _: here.main(),
    "measured": measured.main,
    "targets": targets.main,
    "rooflines": rooflines.main,
    "absent": absent.main,
    "recipes": recipes.main,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that the command line names.

    Args:
        arguments: of the command line, by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profiles", metavar="FOLDER", help="of `choice`: a folder with a graph.txt in each of its folders")
    parser.add_argument("--seconds", type=float, help=f"of `choice`: CPU seconds of each comparison, by default {choice.SECONDS:g}")
    models = [*targets.MODELS, *(name for name in rooflines.LAYERS if name not in targets.MODELS)]
    parser.add_argument("--models", nargs="+", choices=models, help="of `targets` or `rooflines`; by default all that it has")
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=[targets.CPU, *known_targets()],
        help="of `targets`, by default a CPU, an H100 and a v5e, or `rooflines`",
    )
    parser.add_argument(
        "--layers", type=int, help="of `rooflines` and `absent`: blocks of a model; by default 4 of the GPT and 2 of others"
    )
    parser.add_argument("--attention", default="xla", choices=["xla", "cudnn"], help="of `rooflines`, in the GPT; by default %(default)s")
    parser.add_argument("--recipes", nargs="+", choices=recipes.RECIPES, help="of `recipes`; by default all")
    parser.add_argument("--whole", action="store_true", help="of `recipes`: compile the stages of the fullest rank, too, which takes long")
    parser.add_argument("--rows", nargs="+", type=int, help="of `targets`: of a microbatch; by default 1 and 4")
    parser.add_argument("--rounds", type=int, default=measured.ROUNDS, help="of `measured`; by default %(default)s")
    parts.run(parser, PARTS, "benchmarks/planner.json", arguments)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    # One thread for each device: otherwise the matrix products of one take the cores of all.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    force_cpu_devices(measured.DEVICES)  # before `parts.run` describes the machine, for `measured`
    main()
