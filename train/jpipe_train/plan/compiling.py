"""The devices that stages are compiled for, and their description in commands."""

import contextlib
from collections.abc import Iterator

import jax

from jpipe import InputError
from jpipe_planner import Device
from jpipe_planner.machine.compiling import Compiling
from jpipe_planner.machine.plain_yaml import parse
from jpipe_planner.machine.targets import find_target
from jpipe_train.config.config import Config
from jpipe_train.console.terminal import first_line
from jpipe_train.plan.inputs import read_text, read_topology

# The temporaries of a CPU's compiler divided by the target's, in 16 bits and otherwise: docs/explanation/planner-accuracy.md.
RATIOS = {
    "cuda": ("an H100's", "1.1 to 12 times (median 1.8)", "0.7 to 3 times (median 1.4)"),
    "tpu": ("a TPU v5e's", "0.3 to 5 times (median 2.3)", ""),
}
_MOST = 2**20  # bytes of a file


def of_this_machine() -> Compiling:
    """Return the devices of this machine, to compile for."""
    devices = jax.local_devices()
    return Compiling(tuple(devices), devices[0].device_kind)


def read_device(name: str, option: str = "--target") -> Device:
    """Return the device that stages are to be compiled for.

    Args:
        name: a target of the table, or a YAML file: of a target, or of a topology, for its device.
        option: the option that names it, for messages.

    Raises:
        InputError: there is no such target or file.
    """
    if name.endswith((".yaml", ".yml")):
        data = parse(read_text(name, option, _MOST), name)
        if isinstance(data, dict) and str(data.get("format")).startswith("jpipe-topology/"):
            return read_topology(name, option).device
    target = find_target(name)
    return Device(target=name, name=target.name)


def compiled_words(config: Config, compiling: Compiling) -> str:
    """Describe which devices the stages are compiled for and, if the plan is for others, by how much the scratch memory may differ."""
    if not compiling.missing:
        return f"compiled for {compiling.kind}"
    instead = f"compiled for this machine ({compiling.kind}), because {compiling.missing}"
    if compiling.devices[0].platform != "cpu":
        return f"{instead}; the scratch memory of other devices may differ"
    computes = config.precision.computes or config.model.compute_dtype
    target, in_16_bits, otherwise = RATIOS[compiling.instead_of or "cuda"]
    if not (ratio := in_16_bits if "16" in computes else otherwise):
        return f"{instead}; the scratch memory of {target} programs may differ, by how much is not known in {computes}"
    return (
        f"{instead}; in {computes} a CPU's compiler asks for {ratio} the scratch memory that {target} asks for, so a plan that misses the "
        "limit by less than its temporaries may fit there, or need less recomputation"
    )


@contextlib.contextmanager
def compiler_errors(kind: str) -> Iterator[None]:
    """Turn XLA's errors during the compilation of stages into an `InputError`.

    Args:
        kind: of the devices, for the message.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"XLA cannot compile the stages for {kind}: {first_line(error)}; try smaller stages or microbatches") from None
