"""Numbers with units in topologies and targets, such as `25 Gbit/s`, `80 GB`, `5 us`."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

import jpipe

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")

_PREFIXES = {
    "": 1.0,
    "K": 1e3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_UNITS: Mapping[str, tuple[dict[str, float], str]] = {
    "bytes per second": ({"B/s": 1.0, "bit/s": 1 / 8}, "25 Gbit/s or 30 GB/s"),
    "bytes": ({"B": 1.0}, "16 GB or 16 GiB"),
    "FLOP/s": ({"FLOP/s": 1.0, "FLOPS": 1.0}, "125 TFLOP/s"),
}
_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}


def in_unit(unit: str) -> BeforeValidator:
    """Return a validator that reads a number, or text with a unit, such as `25 Gbit/s` for bytes per second."""
    units, example = _UNITS[unit]

    def convert(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z/]+)\s*", value)
        for name, factor in units.items():
            prefix = match[2].removesuffix(name) if match and match[2].endswith(name) else None
            if match and prefix in _PREFIXES:
                return _number(match[1], value, example) * factor * _PREFIXES[prefix]
        raise ValueError(f"expected {unit}, such as {example}, found {value!r}")

    return BeforeValidator(convert)


def seconds(value: Any) -> Any:
    """Read a number of seconds, or text with a unit, such as `5 us`."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(s|ms|us|µs|ns)\s*", value)
    if not match:
        raise ValueError(f"expected seconds, such as 5 us or 0.1 ms, found {value!r}")
    return _number(match[1], value, "5 us") / _IN_A_SECOND[match[2]]


def _number(text: str, value: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number and a unit, such as {example}, found {value!r}") from None


def _possible(value: float) -> float:
    """Check that a number does not make a time infinite or zero."""
    if not 1e-3 <= value <= 1e30:
        raise ValueError(f"expected a number from 0.001 to 1e30, found {value:g}; is it a typo?")
    return value


def _of_known_dtypes(rates: dict[str, float]) -> dict[str, float]:
    for name in rates:
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}; {jpipe.errors.nearest(name, DTYPES)}")
    return rates


Positive = Field(gt=0, allow_inf_nan=False)
Possible = AfterValidator(_possible)
Share = Field(ge=1e-6, le=1)
Bandwidth = Annotated[float, in_unit("bytes per second"), Positive, Possible]
Rates = Annotated[dict[str, Annotated[float, in_unit("FLOP/s"), Positive, Possible]], AfterValidator(_of_known_dtypes)]  # by dtype


def _with_python_numbers(value: Any) -> Any:
    """Return a value in which Python's numbers replace the numbers of NumPy, also in dicts and lists."""
    match value:
        case np.generic():
            return value.item()
        case dict():
            return {key: _with_python_numbers(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_with_python_numbers(inner) for inner in value]
    return value


class Data(pydantic.BaseModel):
    """A pydantic model with immutable fields, which rejects unknown fields."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    _python_numbers = pydantic.model_validator(mode="before")(_with_python_numbers)
