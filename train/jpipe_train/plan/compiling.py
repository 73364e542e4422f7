"""Compile the best plans of a search until one fits, and describe the devices for which they are compiled."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jpipe import InputError
from jpipe_planner import Device, Plans
from jpipe_planner.machine.compiling import Compiling
from jpipe_planner.machine.plain_yaml import parse
from jpipe_planner.machine.targets import find_target
from jpipe_planner.ranking import confirm as confirmation
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.ranking.compiled import compile_stages
from jpipe_planner.ranking.find import Attempt, Compiled
from jpipe_train.console.terminal import count, first_line
from jpipe_train.plan.inputs import MOST_TOPOLOGY, read_text, read_topology
from jpipe_train.plan.profiling import Parts


def of_this_machine() -> Compiling:
    """Return the devices of this machine, to compile for."""
    devices = jax.local_devices()
    return Compiling(tuple(devices), devices[0].device_kind)


def read_device(name: str, option: str = "--target") -> Device:
    """Return the device of a target, or of a YAML file with a target or a topology. Raise InputError if there is none."""
    if name.endswith((".yaml", ".yml")):
        data = parse(read_text(name, option, MOST_TOPOLOGY), name)
        if isinstance(data, dict) and str(data.get("format")).startswith("jpipe-topology/"):
            return read_topology(name, option).device
    target = find_target(name)
    return Device(target=name, name=target.name)


def compiled_words(compiling: Compiling) -> str:
    """Say for which devices the stages are compiled. If the plan is for other devices, also say that the scratch memory may differ."""
    if not compiling.missing:
        return f"compiled for {compiling.kind}"
    return (
        f"compiled for this machine ({compiling.kind}), because {compiling.missing}; the scratch memory of other devices may differ "
        "(docs/explanation/planner-accuracy.md)"
    )


@contextlib.contextmanager
def compiler_errors(kind: str) -> Iterator[None]:
    """Turn XLA's errors during the compilation of stages into an `InputError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"XLA cannot compile the stages for {kind}: {first_line(error)}; try smaller stages or microbatches") from None


def nothing_fits(choice: Choice) -> InputError:
    """Return the error if no plan fits."""
    return InputError(*(f"plan: {line}" for line in table.what_would_fit(choice)))


def confirm(plans: Plans, parts: Parts, compiling: Compiling, report: Callable[[Attempt], None]) -> Plans:
    """Compile the fastest plans until one fits, and plans that may be as fast, and rank them again. Raise InputError if none fits."""
    programs = dict[Any, Any]()

    def compile(choice: Choice, ranked: Ranked) -> Compiled:
        pipe = parts.pipeline(choice.plan(ranked))
        return compile_stages(choice, ranked, pipe, parts.rows(ranked.candidate.batch), compiling.devices, programs)

    confirmed = confirmation.confirm(plans, compile, report)
    if not confirmed.attempts and not confirmed.compiled:
        raise nothing_fits(plans.choice)
    if not confirmed.compiled:
        many, change = count(len(confirmed.attempts), "plan"), "use more devices, a smaller batch or devices with more memory"
        raise InputError(
            f"plan: no plan fits: the compiled stages of {many} need too much memory; {change}",
            *(f"plan: {table.attempt(one)}" for one in confirmed.attempts),
            f"plan: stages are {compiled_words(compiling)}",
        )
    return confirmed
