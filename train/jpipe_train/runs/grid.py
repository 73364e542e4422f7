"""The combinations of values that a sweep trains with: a grid, or a random sample of it."""

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jpipe import InputError
from jpipe_planner.machine.plain_yaml import parse
from jpipe_train.runs.request import Request

MOST_RUNS = 10_000
"""The largest number of runs of a sweep; more are probably a typing error."""

_RANGE = re.compile(r"(log|uniform):([^:,]+):([^:,]+)")
_LONGEST_NAME = 120  # of a folder; file systems allow 255 bytes
_DIGITS = 4  # of a number that is drawn from a range


@dataclass(frozen=True)
class Combination:
    """One combination of values.

    Attributes:
        name: the name of its run's folder, such as `learning_rate=0.001,schedule=gpipe`.
        values: the values by key, as YAML.
    """

    name: str
    values: Mapping[str, str]

    @property
    def overrides(self) -> list[str]:
        """The values as replacements of keys of a config."""
        return [f"{key}={value}" for key, value in self.values.items()]


class Range(NamedTuple):
    """A range of numbers from which values are drawn, evenly by themselves or (`is_log`) by their logarithms."""

    low: float
    high: float
    is_log: bool

    def draw(self, source: random.Random) -> str:
        """Return a number in this range, with few digits, as YAML."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        number = source.uniform(low, high)
        return _text(float(f"{math.exp(number) if self.is_log else number:.{_DIGITS}g}"))


def combinations(request: Request) -> list[Combination]:
    """Return the combinations that a sweep trains with, in order; each name occurs once.

    A larger random sample begins with the combinations of a smaller one.

    Raises:
        InputError: the grid cannot be read, or has too many combinations.
    """
    grid = _parsed(request.grid)
    if request.sample is None:
        if (key := next((key for key, values in grid.items() if isinstance(values, Range)), None)) is not None:
            raise InputError(f"--grid {key}: a range has no list of values to try; add --sample N, which draws N of them")
        lists = [values for values in grid.values() if not isinstance(values, Range)]
        _check_count(math.prod(map(len, lists)), "the grid")
        rows = list(itertools.product(*lists))
    else:
        _check_count(request.sample, "--sample")
        rows = _sampled(list(grid.values()), request.sample, request.seed)
    found = [Combination(_name(values), values) for values in (dict(zip(grid, row, strict=True)) for row in rows)]
    return list({combination.name: combination for combination in found}.values())


def _check_count(number: int, what: str) -> None:
    if not 1 <= number <= MOST_RUNS:
        raise InputError(f"sweep: expected 1 to {MOST_RUNS:,} runs, found {what} of {number:,}; give fewer values, or --sample N")


def _sampled(values: Sequence[list[str] | Range], number: int, seed: int) -> list[tuple[str, ...]]:
    """Draw combinations; without ranges, do not repeat any."""
    lists = [options for options in values if not isinstance(options, Range)]
    if len(lists) == len(values) and (size := math.prod(map(len, lists))) <= MOST_RUNS:
        rows = list(itertools.product(*lists))
        random.Random(seed).shuffle(rows)  # noqa: S311 - values of a config, not secrets
        return rows[: min(number, size)]
    sources = [random.Random(f"{seed} {draw}") for draw in range(number)]  # noqa: S311 - the same
    return [tuple(o.draw(source) if isinstance(o, Range) else source.choice(o) for o in values) for source in sources]


def _parsed(grid: Sequence[str]) -> dict[str, list[str] | Range]:
    """Return the values of each key: a list of YAML texts, or a range."""
    if not grid:
        raise InputError("sweep: expected at least one --grid KEY=VALUE,VALUE, such as optimizer.learning_rate=1e-3,3e-3, found none")
    parsed: dict[str, list[str] | Range] = {}
    for item in grid:
        key, equals, text = item.partition("=")
        if not equals or not key or not text:
            raise InputError(f"--grid {item}: expected KEY=VALUE,VALUE, such as optimizer.learning_rate=1e-3,3e-3; add the values")
        if key in parsed:
            raise InputError(f"--grid {item}: the key occurs twice; put all its values into one --grid, with commas")
        if key == "run.dir":
            raise InputError(f"--grid {item}: a sweep chooses the folder of each run; leave it out, or name their folder with --dir")
        match = _RANGE.fullmatch(text)
        parsed[key] = _range(item, *match.groups()) if match else list(dict.fromkeys(_value(item, part) for part in _split(text)))
    return parsed


def _range(item: str, kind: str, low: str, high: str) -> Range:
    try:
        found = Range(float(low), float(high), kind == "log")
    except ValueError:
        found = Range(math.nan, math.nan, False)
    if not (math.isfinite(found.low) and math.isfinite(found.high) and found.low < found.high and (found.low > 0 or not found.is_log)):
        above = " above 0" if kind == "log" else ""
        raise InputError(f"--grid {item}: expected {kind}:LOW:HIGH with two numbers{above}, the smaller one first; correct them")
    return found


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _value(item: str, text: str) -> str:
    """Return a value as YAML, in a normal form that is the same for equal values."""
    if not text.strip():
        raise InputError(f"--grid {item}: expected a value between all commas, found none; write null for no value")
    value = parse(text, f"--grid {item}", "put text with special characters in quotes of its own")
    try:
        return _text(value)
    except (TypeError, ValueError):
        raise InputError(
            f"--grid {item}: {text} is no value of a config; give a number, text, true, false, null, a list or a mapping"
        ) from None


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)  # which is YAML, too


def _name(values: Mapping[str, str]) -> str:
    """Return the name of a run: its values by the last parts of their keys, if these are unambiguous."""
    last = [key.rpartition(".")[2] for key in values]
    keys = last if len(set(last)) == len(last) else list(values)
    whole = ",".join(f"{key}={_plain(value)}" for key, value in zip(keys, values.values(), strict=True))
    safe = re.sub(r"[^\w.,=+-]+", "-", whole, flags=re.ASCII)
    if safe == whole and len(safe) <= _LONGEST_NAME:
        return safe
    return f"{safe[:_LONGEST_NAME]}-{hashlib.sha256(json.dumps(dict(values)).encode()).hexdigest()[:8]}"


def _plain(value: str) -> str:
    """Return a value as written in a name: text without quotes."""
    data = json.loads(value)
    return data if isinstance(data, str) else value
