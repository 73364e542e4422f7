"""A roofline of compiled programs: the bytes, FLOPs and least seconds of each kernel, read from the text of an optimized program.

A kernel is an instruction of the scheduled program, such as a fusion, that the device runs on its own. Its time is a fixed time plus the
longer of two times: of its bytes at the memory's bandwidth, and of its products at the peak rate. Kernels do not overlap, and no
cache keeps their results. If a TPU prefetches bytes into its fast memory, they count for the kernel that reads them there.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jpipe.model import window_pairs
from jpipe_planner.machine.device import Device

__all__ = ["Kernel", "Rates", "read_kernels"]

KERNEL_SECONDS: Mapping[str, float] = {"cuda": 2e-6}
"""The assumed fixed seconds of a kernel, by platform. A TPU launches no kernels: its program is one stream of instructions."""


@dataclass(frozen=True)
class Rates:
    """The rates that limit the kernels of a device.

    Attributes:
        bandwidth: bytes per second of its memory.
        flops: the FLOPs per second that matrix products reach, by dtype.
        kernel_seconds: the fixed time of a kernel.
    """

    bandwidth: float
    flops: Mapping[str, float]
    kernel_seconds: float = 0.0

    @classmethod
    def of(cls, device: Device) -> "Rates":
        """Return the rates of a device. The rate of products is the peak rate times the efficiency."""
        target, bandwidth, flops, fixed = device.compiles_for, device.memory_bandwidth, device.flops, 0.0
        if target is not None:
            bandwidth, flops, fixed = bandwidth or target.memory_bandwidth, flops or target.flops, KERNEL_SECONDS.get(target.platform, 0.0)
        return cls(bandwidth or math.inf, {dtype: rate * device.efficiency for dtype, rate in flops.items()}, fixed)

    def seconds(self, moved: float, products: Iterable[tuple[float, str]]) -> float:
        """Return the time of a kernel that moves `moved` bytes and computes `products`, pairs of FLOPs and the factors' dtype in HLO."""
        products = list(products)
        if not moved and not products:
            return 0.0
        return max(moved / self.bandwidth, sum(flops / self._rate(dtype) for flops, dtype in products)) + self.kernel_seconds

    def _rate(self, dtype: str) -> float:
        """Return the rate for a dtype of HLO. If that is unknown, return the rate of a dtype of the same size, or else the highest rate."""
        name = _NAMES.get(dtype, dtype)
        alike = (rate for known, rate in self.flops.items() if re.findall(r"\d+", known)[:1] == [str(_bits(dtype))])
        return self.flops.get(name) or next(alike, max(self.flops.values()))


_NAMES = {"bf16": "bfloat16", "f64": "float64", "f32": "float32", "tf32": "float32", "f16": "float16", "f8e4m3fn": "float8_e4m3fn"}


@dataclass(frozen=True)
class Kernel:
    """A kernel of a program.

    Attributes:
        name: the name of the instruction.
        kind: `product`, the target of a custom call, or the operation, such as `fusion`.
        bytes: the bytes that one run reads and writes.
        flops: the FLOPs of the matrix products of one run.
        seconds: the least time of one run.
        runs: how often the program runs the kernel.
        source: the innermost line of the model, `file:line`, or "".
        op_name: the name in JAX, such as `jit(backward)/dot_general`, or "".
    """

    name: str
    kind: str
    bytes: float
    flops: float
    seconds: float
    runs: int = 1
    source: str = ""
    op_name: str = ""


def read_kernels(text: str, rates: Rates) -> tuple[Kernel, ...]:
    """Return the kernels of an optimized program, from the text of `jax.stages.Compiled.as_text`, in the order in which they run.

    The body of a loop counts as often as it runs, or once if that is unknown. Only the longest branch of a conditional counts.
    """
    return tuple(_Module(text, rates).kernels())


# The text --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """An array in the text, such as `bf16[4,8]{1,0:T(8,128)S(1)}`: `space` 0 is the memory of the device."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def space(self) -> int:
        found = re.search(r"S\((\d+)\)", self.layout)
        return int(found[1]) if found else 0

    @functools.cached_property
    def size(self) -> float:
        """The bytes that the array takes in memory, in whole tiles."""
        minor_to_major = [int(axis) for axis in re.findall(r"\d+", self.layout.partition(":")[0])]
        sides = [self.shape[axis] for axis in minor_to_major] if len(minor_to_major) == len(self.shape) else [*reversed(self.shape)]
        if tile := re.search(r"T\(([\d,]+)\)", self.layout):
            tiles = [int(side) for side in reversed(tile[1].split(","))]
            sides += [1] * (len(tiles) - len(sides))
            sides = [-(-side // tile) * tile for side, tile in zip(sides, tiles, strict=False)] + sides[len(tiles) :]
        return math.prod(sides) * _bits(self.dtype) / 8

    @property
    def moved(self) -> float:
        """The bytes that a read or write of the array moves from or to the memory of the device."""
        return 0.0 if self.space else self.size


@dataclass(frozen=True)
class _Instruction:
    name: str
    arrays: tuple[_Array, ...]  # its results
    op: str
    operands: tuple[str, ...]
    line: str

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in the line of the instruction, or ""."""
        found = re.search(pattern, self.line)
        return found[1] if found else ""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that the instruction runs."""
        many = self.attribute(r"branch_computations=\{([^}]*)\}")
        return tuple(re.findall(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)", self.line)) or tuple(
            re.findall(r"%?([\w.-]+)", many)
        )

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.attribute(r'custom_call_target="([^"]+)"')


_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "add-dependency"}
_FREE |= {"partition-id", "replica-id", "ConcatBitcast", "AssumeGatherIndicesInBound", "AllocateBuffer"}
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_ELEMENTS = ("bitcast", "convert", "copy", "reshape")
_PALLAS = "tpu_custom_call"
_SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}  # products in each kernel of splash attention
_LIBRARIES = re.compile(r"/(?:jax|flax|optax)/")


def _bits(dtype: str) -> int:
    return int((re.findall(r"\d+", dtype) or ["8"])[0])


class _Module:
    """The computations of a program. Each computation is the list of its instructions."""

    def __init__(self, text: str, rates: Rates) -> None:
        self._rates = rates
        self._computations: dict[str, dict[str, _Instruction]] = {}
        self._roots: dict[str, str] = {}
        self._frames = _Frames(text)
        name = ""
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                name = found[2]
                self._computations[name] = {}
                self._entry = name if found[1] else getattr(self, "_entry", name)
            elif name and (found := _INSTRUCTION.match(line)):
                arrays = tuple(_Array(dtype, _shape(sides), layout) for dtype, sides, layout in _ARRAY.findall(found[2]))
                operands = tuple(re.findall(r"%([\w.-]+)", found[4].partition("), ")[0]))
                self._computations[name][found[1]] = _Instruction(found[1], arrays, found[3], operands, line)
                if line.lstrip().startswith("ROOT "):
                    self._roots[name] = found[1]

    def kernels(self, computation: str = "") -> Iterator[Kernel]:
        """Yield the kernels of a computation, by default of the whole program."""
        local = self._computations[computation or self._entry]
        ahead: dict[str, float] = {}  # bytes moved into fast memory that no kernel has read yet
        for each in local.values():
            moved = sum(ahead.pop(name, 0.0) for name in each.operands)
            if each.op in ("copy-start", "slice-start"):
                before, result = local[each.operands[0]].arrays[0], each.arrays[each.op == "slice-start"]
                moved += (0.0 if before.space else _Array(result.dtype, result.shape, before.layout).size) + result.moved
                if result.space:
                    ahead[each.name] = moved
                    continue
            elif each.op in _FREE or each.target in _FREE or each.op.endswith("-done"):
                ahead[each.name] = moved
                continue
            elif each.op == "while":
                runs = self._trips(each)
                yield from (dataclasses.replace(kernel, runs=kernel.runs * runs) for kernel in self.kernels(each.called[0]))
                continue
            elif each.op in ("call", "conditional", "async-start") and each.called:
                branches = [list(self.kernels(called)) for called in each.called]
                yield from max(branches, key=lambda branch: sum(kernel.seconds * kernel.runs for kernel in branch))
                continue
            else:
                moved += self._moved(each, local)
            products = [*self._products(each, local)]
            flops = sum(flops for flops, _ in products)
            kind = "product" if products else each.target or each.op
            op_name, source = self._origin(each, local)
            yield Kernel(each.name, kind, moved, flops, self._rates.seconds(moved, products), 1, source, op_name)

    def _trips(self, loop: _Instruction) -> int:
        """Return how often a loop runs, from XLA's note for GPUs or from the limit of a scan's counter in its condition, or else 1."""
        if known := loop.attribute(r'known_trip_count[^}]*?"n":"(\d+)"'):
            return int(known)
        condition = loop.attribute(r"condition=%?([\w.-]+)")
        compared = self._computations[condition][self._roots[condition]]
        limits = (self._computations[condition][name].attribute(r" constant\((\d+)\)") for name in compared.operands)
        return int(next(filter(None, limits), 1)) if "direction=LT" in compared.line else 1

    # Bytes -------------------------------------------------------------------------------------------------------------

    def _moved(self, each: _Instruction, local: Mapping[str, _Instruction]) -> float:
        """Return the bytes that a kernel reads and writes. If it reads or writes only a slice of an array, only the slice counts."""
        moved = 0.0
        for name in dict.fromkeys(each.operands):
            if name in local:
                whole = sum(array.moved for array in local[name].arrays)
                parts = [self._read(each, position, local) for position, operand in enumerate(each.operands) if operand == name]
                moved += min(whole, sum(whole if part is None else part for part in parts))
        return moved + sum(min(array.moved, part) for array, part in zip(each.arrays, self._written(each, local), strict=True))

    def _read(self, reader: _Instruction, position: int, local: Mapping[str, _Instruction]) -> float | None:
        """Return how many bytes of the operand at a position an instruction reads; None: the whole operand."""
        if reader.op == "fusion":
            inner = self._computations[reader.called[0]]
            name = next((one.name for one in inner.values() if one.op == "parameter" and f" parameter({position})" in one.line), "")
            return self._read_by_all(name, inner)
        if position:
            return None
        if reader.op in _SLICES:
            return reader.arrays[0].size
        if reader.op in ("dynamic-update-slice", "scatter"):  # a scatter reads the elements to which it adds
            return 0.0 if reader.op == "dynamic-update-slice" else local[reader.operands[-1]].arrays[0].size
        return self._read_by_all(reader.name, local) if reader.op in _SAME_ELEMENTS else None

    def _read_by_all(self, name: str, local: Mapping[str, _Instruction]) -> float | None:
        """Return how many bytes of a value the instructions of a fusion read; None: the whole value."""
        readers = [(one, i) for one in local.values() for i, operand in enumerate(one.operands) if operand == name]
        parts = [self._read(reader, i, local) for reader, i in readers]
        return None if None in parts or not parts else sum(part for part in parts if part is not None)

    def _written(self, each: _Instruction, local: Mapping[str, _Instruction]) -> list[float]:
        """Return the bytes that an instruction writes into each of its results."""
        if each.op == "fusion":
            inner = self._computations[each.called[0]]
            return self._written(inner[self._roots[each.called[0]]], inner)
        if each.op == "tuple":
            return [self._written(local[name], local)[0] for name in each.operands]
        if each.op == "bitcast" and local[each.operands[0]].op != "parameter":
            return self._written(local[each.operands[0]], local)
        if each.op in ("dynamic-update-slice", "scatter"):
            update = each.operands[1 if each.op == "dynamic-update-slice" else -1]
            return [local[update].arrays[0].size] * len(each.arrays)
        return [math.inf] * len(each.arrays)  # each whole result

    # FLOPs -------------------------------------------------------------------------------------------------------------

    def _products(self, each: _Instruction, local: Mapping[str, _Instruction]) -> Iterator[tuple[float, str]]:
        """Yield (FLOPs, dtype of the factors) for each product in a kernel."""
        if each.op == "fusion":
            inner = self._computations[each.called[0]]
            for one in inner.values():
                yield from self._products(one, inner)
        elif each.op in ("dot", "convolution") or each.op == "custom-call":
            factors = [local[name].arrays[0] for name in each.operands if name in local and local[name].arrays]
            if flops := _flops(each, factors):
                of = each.arrays if each.target == _PALLAS else factors
                yield flops, each.attribute(r"algorithm=dot_([a-z]+\d+)_") or of[0].dtype

    # Sources -----------------------------------------------------------------------------------------------------------

    def _origin(self, each: _Instruction, local: Mapping[str, _Instruction]) -> tuple[str, str]:
        """Return the name in JAX and the line of the model for an instruction, or else for one inside it, or for an operand."""
        inner = self._computations.get(each.called[0], {}).values() if each.called else ()
        candidates = [each, *reversed(inner), *(local[name] for name in each.operands if name in local)]
        name = next(filter(None, (one.attribute(r'op_name="([^"]*)"') for one in candidates)), "")
        return name, next(filter(None, map(self._frames.source, candidates)), "")


def _shape(sides: str) -> tuple[int, ...]:
    return tuple(int(side) for side in re.findall(r"\d+", sides))


def _numbers(text: str) -> Sequence[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _flops(each: _Instruction, factors: Sequence[_Array]) -> float:
    """Return the FLOPs of a dot, a convolution, a call of cuBLAS or cuDNN's attention, or splash attention; 0 for other instructions."""
    out = math.prod(each.arrays[0].shape) if each.arrays else 0
    if each.op == "convolution" or "conv" in each.target:
        return _convolution_flops(each, factors)
    if "fmha" in each.target:  # two products with a matrix of scores in a forward, five in a backward; half of each if causal
        scores = _numbers(each.attribute(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)\]'))
        products = (5 if "Backward" in each.target else 2) / (2 if "CAUSAL" in each.line else 1)
        return 2 * math.prod(scores) * factors[0].shape[-1] * products
    if each.target == _PALLAS and (kernel := re.match(r"splash_mha_(fwd|dq|dkv)_", each.name)):  # as if causal; a window has fewer
        length, size = each.arrays[0].shape[-2:]
        queries = max(math.prod(factor.shape) for factor in factors if factor.shape[-2:] == (length, size))
        return float(queries * length * _SPLASH[kernel[1]])
    if each.op == "dot" or "cublas" in each.target:
        contracted = each.attribute(r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([^}\]]*)")
        return 2.0 * out * math.prod(factors[0].shape[axis] for axis in _numbers(contracted))
    return 0.0


def _convolution_flops(each: _Instruction, factors: Sequence[_Array]) -> float:
    """Return 2 FLOPs for each multiplication of an input and a weight. On TPUs matrix products are convolutions with dilated windows."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.line)
    if labels is None:
        return 0.0
    of_input, of_kernel, of_output = labels.groups()
    window = dict(re.findall(r"(\w+)=([\w-]+(?:x[\w-]+)*)", each.attribute(r"window=\{([^}]*)\}")))
    (image, kernel, *_), out = factors, each.arrays[0].shape
    flops = 2.0 * out[of_output.index("b")] * out[of_output.index("f")] * kernel.shape[of_kernel.index("i")]
    for i, axis in enumerate(sorted(set(of_output) - {"b", "f"})):

        def of_axis(name: str, default: str, i: int = i) -> str:
            return window[name].split("x")[i] if name in window else default

        stride, dilation, spread = (int(of_axis(name, "1")) for name in ("stride", "rhs_dilate", "lhs_dilate"))
        before, size = int(of_axis("pad", "0_0").split("_")[0]), image.shape[of_input.index(axis)]
        flops *= window_pairs(size, kernel.shape[of_kernel.index(axis)], out[of_output.index(axis)], stride, before, spread, dilation)
    return flops


class _Frames:
    """The lines of Python code that a program was traced from. They are in its metadata or, with newer XLA, in tables before it."""

    def __init__(self, text: str) -> None:
        tables = {name: _table(text, name) for name in ("FileNames", "FileLocations", "StackFrames")}
        self._files = {number: row.strip('"') for number, row in tables["FileNames"].items()}
        self._locations = {number: _numbers(row) for number, row in tables["FileLocations"].items()}  # file, function, line, …
        self._frames = {number: _numbers(row) for number, row in tables["StackFrames"].items()}  # location, parent
        self._first = self._frames.get(1, [0, 0])[1]  # the parent number of a frame without a parent

    def source(self, each: _Instruction) -> str:
        """Return the innermost line outside of JAX's libraries, or else the innermost line, as `file:line`; "" if it is unknown."""
        if file := each.attribute(r'source_file="([^"]*)"'):
            return file + ":" + each.attribute(r"source_line=(\d+)")
        frame, lines = int(each.attribute(r"stack_frame_id=(\d+)") or 0), list[str]()
        while frame in self._frames:
            location, parent = self._frames[frame]
            number, _, line = self._locations[location][:3]
            lines.append(f"{self._files[number]}:{line}")
            frame = parent - self._first
        return next((line for line in lines if not _LIBRARIES.search(line)), lines[0] if lines else "")


def _table(text: str, name: str) -> dict[int, str]:
    """Return the rows of a table before the program, by row number."""
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = found[1].splitlines() if found else ()
    return {int(number): rest for number, _, rest in (row.partition(" ") for row in rows)}
