"""The rooflines of a plan: one for each program of its stages, and one for the whole train step as a single program."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax

import jpipe
from jpipe import InputError
from jpipe_planner.machine.compiling import Compiling, bytes_beyond_memory
from jpipe_planner.machine.device import Device
from jpipe_planner.machine.roofline import Kernel, Rates, read_kernels

__all__ = ["ProgramRoofline", "Rooflines", "find_programs", "find_whole", "most_expensive"]


@dataclass(frozen=True)
class ProgramRoofline:
    """The roofline of a program.

    Attributes:
        stage: the number of the stage; None for the whole step.
        op: the name of the program, such as `forward`.
        calls: how often a step in steady state calls the program, over all replicas and all devices of a mesh.
        kernels: the kernels of one call on one device.
    """

    stage: int | None
    op: str
    calls: int
    kernels: tuple[Kernel, ...]

    def total(self, figure: Literal["bytes", "flops", "seconds"]) -> float:
        """Return the sum of a figure of the kernels over all calls of a step."""
        return self.calls * sum(getattr(kernel, figure) * kernel.runs for kernel in self.kernels)


@dataclass(frozen=True)
class Rooflines:
    """The rooflines of a plan.

    Attributes:
        programs: the rooflines of the programs of each stage.
        whole: the roofline of the same step as one program on one device; None if XLA cannot compile this program.
        missing: why `whole` is None, or "".
    """

    programs: tuple[ProgramRoofline, ...]
    whole: ProgramRoofline | None
    missing: str = ""

    @property
    def share(self) -> float | None:
        """The throughput of the plan relative to `whole`: the seconds of `whole` divided by the seconds of all programs, or None."""
        return None if self.whole is None else self.whole.total("seconds") / sum(program.total("seconds") for program in self.programs)


def find_programs(
    pipe: jpipe.Pipeline, batch: Any, device: Device, compiling: Compiling, programs: dict[Any, Any] | None = None
) -> tuple[ProgramRoofline, ...]:
    """Compile the stages of a plan for a device and return the rooflines of their programs; new programs are added to `programs`."""
    rates, read = Rates.of(device), dict[int, tuple[Kernel, ...]]()  # by program, because equal stages share their programs
    found = list[ProgramRoofline]()
    for s, compiled in enumerate(pipe.compiled_calls(batch, compiling.devices, {} if programs is None else programs)):
        for op, (program, calls) in compiled.items():
            if id(program) not in read:
                read[id(program)] = read_kernels(program.as_text() or "", rates)
            found.append(ProgramRoofline(s, op, calls * pipe.plan.stages[s].devices_each, read[id(program)]))
    return tuple(found)


def find_whole(pipe: jpipe.Pipeline, batch: Any, device: Device, compiling: Compiling) -> ProgramRoofline:
    """Compile a train step of a model as one stage as one program, and return its roofline. Raise InputError if it exceeds the memory."""
    first = compiling.devices[0]
    try:
        step = jpipe.stages.compile_for_analysis(pipe.lower_whole_step(batch, first), first)
    except jax.errors.JaxRuntimeError as error:
        if (sizes := bytes_beyond_memory(error)) is None:
            raise
        raise InputError(f"one device has {sizes[1] / 2**30:.1f} GiB, and it needs {sizes[0] / 2**30:.1f} GiB") from None
    return ProgramRoofline(None, "train_step", 1, read_kernels(step.as_text() or "", Rates.of(device)))


def most_expensive(programs: Iterable[ProgramRoofline], count: int) -> list[tuple[str, Kernel]]:
    """Return (op, kernel) of the kernels that take the most seconds in a step. Equal kernels, as in equal layers, count as one."""
    sums: dict[tuple[str, Kernel], int] = {}
    for program in programs:
        for kernel in program.kernels:
            alike = program.op, dataclasses.replace(kernel, name="", runs=0)
            sums[alike] = sums.get(alike, 0) + kernel.runs * program.calls
    kernels = [(op, dataclasses.replace(kernel, runs=runs)) for (op, kernel), runs in sums.items()]
    return sorted(kernels, key=lambda each: -each[1].seconds * each[1].runs)[:count]
