"""Scratch memory from XLA, for single layers, pairs of neighbours and triples of neighbours as stages; and rooflines of single layers."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

import jpipe
from jpipe_planner.machine.compiling import bytes_beyond_memory
from jpipe_planner.machine.roofline import Rates, read_kernels
from jpipe_planner.profile.model import Meter, Model, StageCosts

__all__ = ["KINDS", "compile_program"]

Kind = Literal["forward", "backward"]
KINDS: tuple[Kind, ...] = ("forward", "backward")
_Ids = tuple[str, ...]


@dataclass(frozen=True)
class Scratch:
    """Scratch bytes of compiled programs of some layers, from which the scratch memory of each layer in a profile follows.

    Attributes:
        model: the model.
        stage_costs: the result of `count_bytes`.
        layers: for each distinct layer the larger scratch memory of its forward and its backward, by layer and rows.
        pairs: for each pair of neighbours the same, without recomputation, by rows.
        backwards: for each pair of neighbours the scratch memory of its backward.
        full: for layers and pairs of neighbours, and except on GPUs for triples, the scratch memory of the backward with full
            recomputation, for the largest microbatch; empty if unknown.
    """

    model: Model
    stage_costs: StageCosts
    layers: Mapping[tuple[str, int], int]
    pairs: Mapping[tuple[str, ...], Mapping[int, int]]
    backwards: Mapping[tuple[str, ...], Mapping[int, int]]
    full: Mapping[tuple[str, ...], int]

    def more(self, equal: str, next_equal: str | None, rows: int) -> int:
        """Return the scratch bytes that a layer and the next layer together need beyond the larger scratch memory of both."""
        if next_equal is None:
            return 0
        pair = self.model.pairs[equal, next_equal]
        return max(self.pairs[pair][rows] - self._larger(equal, next_equal, rows), 0)

    def remaking(self, equal: str, rows: int) -> int | None:
        """Return the scratch bytes of a backward that recomputes the residuals of a layer."""
        if not self.full:
            return None
        additional = self.full[equal,] - self.layers[equal, self.model.sizes[-1]]
        return max(self.layers[equal, rows] + math.ceil(additional * self._share_of_largest(equal, rows)), 0)

    def remaking_next(self, equal: str, next_equal: str | None, rows: int) -> int:
        """Return the bytes to add to `remaking` if only the next layer of the stage follows."""
        if next_equal is None or not self.full:
            return 0
        together = self.full[self.model.pairs[equal, next_equal]] - self.full[next_equal,]
        return self._at_rows(together, equal, next_equal, rows)

    def remaking_more(self, equal: str, next_equal: str | None, rows: int) -> int:
        """Return the bytes to add to `remaking` if the next layer and further layers follow."""
        triple = () if next_equal is None else self.model.triples.get((equal, next_equal), ())
        if next_equal is None or triple not in self.full:
            return self.remaking_next(equal, next_equal, rows)
        second, third = (self.model.first_equal[layer_id] for layer_id in triple[1:])
        return self._at_rows(self.full[triple] - self.full[self.model.pairs[second, third]], equal, next_equal, rows)

    def _at_rows(self, most: int, equal: str, next_equal: str, rows: int) -> int:
        """Return the bytes that a layer adds at a size, given the bytes at the largest size. Gradients do not depend on the rows."""
        backwards = self.backwards[self.model.pairs[equal, next_equal]]
        of_gradients, largest = (
            max(backwards[count] - self._larger(equal, next_equal, count), 0) for count in (rows, self.model.sizes[-1])
        )
        return max(of_gradients + math.ceil((most - largest) * self._share_of_largest(equal, rows)), 0)

    def _larger(self, equal: str, next_equal: str, rows: int) -> int:
        return max(self.layers[one, rows] for one in (equal, next_equal))

    def _share_of_largest(self, equal: str, rows: int) -> float:
        """Return the residuals of a microbatch as a share of the largest microbatch's."""
        some, most = (self.stage_costs[equal,][count, "none"].residuals for count in (rows, self.model.sizes[-1]))
        return some / most if most else 1.0


class ScratchPrograms:
    """Programs that threads compile to find their scratch memory, while other programs are traced. Equal programs are compiled once.

    Without recomputation only the smallest and the largest size are compiled, and the sizes between are interpolated. The forward of the
    smallest size is compiled only if at the largest size the forward needs more than the backward, and the forward of a pair only if this
    is so for one of its layers. With full recomputation only the largest size is compiled, because the additional bytes are proportional to
    the residuals. There triples of neighbours are compiled as well, because for TPUs a third layer adds much less than the second. For GPUs
    it adds the same, and its program takes long to compile. Only `seconds` needs `rates`.
    """

    def __init__(
        self, model: Model, policies: Sequence[str], device: jax.Device, pool: Executor, meter: Meter, rates: Rates | None = None
    ) -> None:
        self._model, self._device, self._pool, self._meter, self._rates = model, device, pool, meter, rates
        self._ends, self._largest = tuple(dict.fromkeys((model.sizes[0], model.sizes[-1]))), model.sizes[-1]
        self._pairs: list[_Ids] = [*model.pairs.values()]
        triples = model.triples.values() if device.platform != "gpu" else ()
        remade: list[_Ids] = [*((one,) for one in model.distinct), *self._pairs, *triples]
        self._remade = remade if "full" in policies else []  # with full recomputation
        self._compiled: dict[tuple[_Ids, int, Kind, str], Future[tuple[int, float | None]]] = {}
        self._by_key: dict[str, Future[tuple[int, float | None]]] = {}

    def begin_neighbours(self) -> None:
        """Begin to compile pairs of neighbours and backwards that recompute: several layers need more scratch memory than each layer."""
        for ids in self._pairs:
            self.begin(ids)
        for ids in self._remade:
            self._begin(ids, self._largest, "backward", "full")

    def scratch(self, stage_costs: StageCosts, layers: Mapping[tuple[str, int], int] | None = None) -> Scratch:
        """Wait for all programs and return their scratch memory; `layers` have the single layers if they were not begun here."""
        self._meter.wait()
        singles = [(one,) for one in self._model.distinct] if layers is None else []
        for ids in self._pairs:
            if layers is not None or any(self._forward_decides((self._model.first_equal[one],)) for one in ids):
                self._begin(ids, self._largest, "forward")
        for ids in [*singles, *self._pairs]:
            if self._forward_decides(ids):
                self._begin(ids, self._ends[0], "forward")
        if layers is None:
            layers = {(ids[0], rows): size for ids in singles for rows, size in self._by_rows(ids).items()}
        pairs, backwards = ({ids: self._by_rows(ids, both=both) for ids in self._pairs} for both in (True, False))
        full = {ids: self._known(ids, self._largest, "backward", "full") for ids in self._remade}
        return Scratch(self._model, stage_costs, layers, pairs, backwards, full)

    def begin(self, ids: _Ids) -> None:
        """Begin to compile some layers: backward at both ends, a single layer's forward at the largest size, or both for `seconds`."""
        for rows in self._ends:
            self._begin(ids, rows, "backward")
        for rows in self._ends[0 if self._rates else -1 :] if len(ids) == 1 else ():
            self._begin(ids, rows, "forward")

    def seconds(self, layer_id: str, kind: Kind) -> dict[int, float]:
        """Return the roofline of a layer's program at the smallest and the largest size, where XLA could compile it; {} without rates."""
        compiled = {rows: self._compiled[(layer_id,), rows, kind, "none"].result()[1] for rows in self._ends if self._rates}
        return {rows: seconds for rows, seconds in compiled.items() if seconds is not None}

    def _forward_decides(self, ids: _Ids) -> bool:
        """Return whether the forward needs more than the backward. Of a pair it does not if it does of neither layer."""
        is_known = (ids, self._largest, "forward", "none") in self._compiled
        return is_known and self._known(ids, self._largest, "forward") > self._known(ids, self._largest, "backward")

    def _begin(self, ids: _Ids, rows: int, kind: Kind, recompute: str = "none") -> None:
        lowered = self._model.stage(ids, rows, recompute).trace(kind, self._device, any_layout=True).lower()
        key = jpipe.stages.program_key(lowered)
        if key not in self._by_key:
            rates = self._rates if len(ids) == 1 and recompute == "none" else None
            self._meter.begin(future := self._pool.submit(compile_program, lowered, self._device, rates))
            self._by_key[key] = future
        self._compiled[ids, rows, kind, recompute] = self._by_key[key]

    def _known(self, ids: _Ids, rows: int, kind: Kind, recompute: str = "none") -> int:
        return self._compiled[ids, rows, kind, recompute].result()[0]

    def _by_rows(self, ids: _Ids, *, both: bool = True) -> dict[int, int]:
        """Return the scratch bytes of the backward at each size; with `both`, of the forward if it needs more."""
        kinds = KINDS if both and self._forward_decides(ids) else KINDS[1:]
        at_ends = [max(self._known(ids, rows, kind) for kind in kinds) for rows in self._ends]
        return {rows: math.ceil(np.interp(rows, self._ends, at_ends)) for rows in self._model.sizes}


@contextlib.contextmanager
def compiling_threads() -> Iterator[Executor]:
    """Give a pool with a thread for each core; XLA releases Python's lock while it compiles. After an error nothing more is compiled."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def compile_program(program: jax.stages.Lowered, device: jax.Device, rates: Rates | None = None) -> tuple[int, float | None]:
    """Compile a program; return its scratch memory (in XLA's error if it exceeds a TPU's), and with rates the seconds of its kernels."""
    try:
        compiled = jpipe.stages.compile_for_analysis(program, device)
    except jax.errors.JaxRuntimeError as error:
        if (sizes := bytes_beyond_memory(error)) is None:
            raise
        return math.ceil(sizes[0]), None
    kernels = read_kernels(compiled.as_text() or "", rates) if rates else ()
    return scratch_bytes(compiled), sum(kernel.seconds * kernel.runs for kernel in kernels) if rates else None


def scratch_bytes(program: jax.stages.Compiled) -> int:
    """Return the scratch memory of a program; 0 if the backend does not report it."""
    analysis = program.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes
