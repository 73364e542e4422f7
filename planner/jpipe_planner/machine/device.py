"""The figures of a device, given directly or by a target."""

from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
from pydantic import Field

import jpipe
from jpipe_planner.machine.targets import Host, Target, find_target
from jpipe_planner.machine.units import Bandwidth, Data, Positive, Possible, Rates, Share, in_unit


class Device(Data):
    """The figures of a device.

    Attributes:
        name: a name to show; by default the name of the target.
        target: a name in the table of `jpipe target`, or a YAML file of the same format. Stages are compiled for this target, and its
            figures are the defaults. None: stages are compiled for the devices of this machine.
        memory: bytes; None: not limited.
        reserved: bytes that a plan leaves free, a dict from a purpose to bytes; also a single number or text for the sum.
        flops: peak operations per second, by dtype; for analytic profiles.
        efficiency: share of `flops` that large matrix products reach in training.
        memory_bandwidth: bytes per second; for analytic profiles.
        overlap: what overlaps with computations: `none`, `transfers`, or `transfers and sums`. With a target the default is `none`, because
            a GPU may queue transfers and sums between computations, and this is not measured. Without a target the default is `transfers
            and sums`, because these have separate threads on CPUs. `local_topology` measures the overlap.
        host: the host memory in which parts of the state may wait, and the link to it; by default the host of the target.
            `local_topology` measures the link.
    """

    name: str = "device"
    target: str | None = None
    memory: Annotated[float, in_unit("bytes"), Positive, Possible] | None = None
    reserved: dict[str, Annotated[float, in_unit("bytes"), Field(ge=0, le=1e15)]] = Field(default_factory=dict)
    flops: Rates = Field(default_factory=dict)
    efficiency: Annotated[float, Share] = 0.5
    memory_bandwidth: Bandwidth | None = None
    overlap: jpipe.programs.Overlap = "transfers and sums"
    host: Host = Host()

    @property
    def limit(self) -> float | None:
        """The bytes that a plan may use: `memory` minus `reserved`; None: not limited."""
        return None if self.memory is None else self.memory - sum(self.reserved.values())

    @property
    def compiles_for(self) -> Target | None:
        """The target that stages are compiled for, or None for the devices of this machine."""
        return None if self.target is None else find_target(self.target)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_figures_of_target(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        if isinstance(reserved := fields.get("reserved"), str | int | float):
            fields = {**fields, "reserved": {"reserved": reserved}}
        if not isinstance(fields.get("target"), str):
            return fields
        target = find_target(fields["target"])
        figures = {**{name: getattr(target, name) for name in ("name", *_FIGURES)}, "overlap": "none", **fields}
        if isinstance(given := fields.get("host"), Mapping):
            figures["host"] = {**target.host.model_dump(), **given}
        return figures

    @pydantic.model_validator(mode="after")
    def _leaves_memory(self) -> "Device":
        if self.limit is not None and self.limit <= 0:
            raise ValueError(
                f"reserved: expected less than the memory of {self.memory:,.0f} bytes, found {sum(self.reserved.values()):,.0f}"
            )
        return self


_FIGURES = ("memory", "reserved", "flops", "efficiency", "memory_bandwidth", "host")  # the fields with defaults from the target
