"""The section `plan` of a config."""

import math
import operator
import reprlib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from jpipe.errors import nearest
from jpipe.plan import RECOMPUTE, CapabilityOptions
from jpipe.schedules import SCHEDULES, ScheduleOptions, name_of
from jpipe_train.config.section import Count, FilePath, Section

MOST_MICROBATCHES = 1024


class _EvenStages(Section):
    """The keys about stages, which come before the options of the schedule."""

    schedule: Annotated[str, AfterValidator(name_of)] = "pipedream_flush"
    num_stages: Count = 4
    layer_costs: Annotated[dict[str, Annotated[float, Field(ge=0, le=10**6)]], Field(max_length=10**5)] = {}
    microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)] = 4
    chunks_per_rank: Count | None = None
    replicas: int | list[int] = 1
    recompute: str | list[str] = "auto"
    mesh: dict[str, int] | list[dict[str, int]] = {}
    fsdp: bool = False


class _Layout(Section):
    """The keys that come between the options of schedules and of capabilities."""

    sync_state: bool = True
    keep_together: Literal["replicas", "stages"] = "replicas"
    rules: dict[str, str | None] = {}
    param_axes: dict[str, list[str | None]] = {}


class PlanConfig(CapabilityOptions, _Layout, ScheduleOptions, _EvenStages):
    """The plan of a run: even stages from these keys, or the JSON file `file`, which overrides them.

    The keys are the arguments of `jpipe.Plan.even`, including the options of the schedule and of capabilities. With `layer_costs`, the
    relative costs of layers (default 1), the stages have equal costs. If `file` is "auto", the run first searches for the fastest plan
    among the schedules that flush, or, if `max_delay` is set, among all schedules with at most this mean delay in updates. A plan file with
    a larger delay is an error. The plans of a search use the values of `agree`, `links` and `slices`. `mesh` maps axes to sizes: the
    devices of each replica of every stage. A list has one mesh per stage; {} is one device.
    """

    sum_parts: Count = 1
    file: FilePath | None = None
    max_delay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    @field_validator("replicas", mode="before")
    @classmethod
    def _counts_of_replicas(cls, value: object) -> object:
        counts = value if isinstance(value, list) else [value]
        if not all(type(count) is int and 1 <= count <= MOST_MICROBATCHES for count in counts):
            expected = f"a number from 1 to {MOST_MICROBATCHES} or a list of them, one for each stage"
            raise ValueError(f"expected {expected}, found {reprlib.repr(value)}")
        return value

    @field_validator("mesh", mode="before")
    @classmethod
    def _meshes(cls, value: object) -> object:
        meshes = value if isinstance(value, list) else [value]
        if not all(isinstance(mesh, dict) and all(type(size) is int and size >= 1 for size in mesh.values()) for mesh in meshes):
            expected = "axes and sizes, such as {data: 2, model: 4}, or a list of them, one for each stage"
            raise ValueError(f"expected {expected}, found {reprlib.repr(value)}; {{}} is one device")
        return value

    @property
    def ranks(self) -> int:
        """The number of ranks of a plan from the keys, ignoring `file`."""
        return max(sum(self._replicas_of_stages) // self.stages_per_rank, 1)

    @property
    def devices(self) -> int:
        """The number of devices of a plan from the keys: the sum of the sizes of all ranks' meshes."""
        meshes = self.mesh if isinstance(self.mesh, list) else [self.mesh] * self.num_stages
        sizes = [math.prod(mesh.values()) for mesh in meshes]
        return max(sum(map(operator.mul, self._replicas_of_stages, sizes)) // self.stages_per_rank, 1)

    @property
    def _replicas_of_stages(self) -> list[int]:
        return [self.replicas] * self.num_stages if isinstance(self.replicas, int) else self.replicas

    @property
    def stages_per_rank(self) -> int:
        """The number of stages on each rank."""
        return self.chunks_per_rank or (2 if SCHEDULES[self.schedule].layout == "v" else 1)

    @property
    def of_even_stages(self) -> dict[str, Any]:
        """The arguments of `jpipe.Plan.even` other than the layers and `layer_costs`."""
        return self.model_dump(exclude={"file", "layer_costs", "max_delay"})

    @field_validator("recompute", mode="before")
    @classmethod
    def _known_policies(cls, value: object) -> object:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"expected a policy's name or a list of names, one for each stage, found {reprlib.repr(value)}")
            if name not in RECOMPUTE:
                raise ValueError(f"unknown recomputation policy {name!r}; {nearest(name, RECOMPUTE)}")
        return value
