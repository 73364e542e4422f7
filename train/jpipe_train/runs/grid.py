"""The combinations of config values that a sweep trains with."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jpipe import InputError
from jpipe_planner.machine.plain_yaml import parse
from jpipe_train.runs.sweep_request import Request

MOST_RUNS = 10_000
"""The largest number of runs in a sweep; a larger grid is probably a typing error."""

_LONGEST_NAME = 120  # the longest name of a run folder; file systems allow 255 bytes


@dataclass(frozen=True)
class Combination:
    """One combination of values."""

    name: str  # the name of the run folder, such as `learning_rate=0.001,schedule=gpipe`
    values: Mapping[str, str]  # a mapping from config keys to values as YAML text

    @property
    def overrides(self) -> list[str]:
        """The combination as overrides of config keys, such as `train.steps=100`."""
        return [f"{key}={value}" for key, value in self.values.items()]


def combinations(request: Request) -> list[Combination]:
    """Return the combinations that a sweep trains with, in order; each name occurs once.

    Raise InputError if the grid cannot be read, or has too many combinations.
    """
    grid = _parsed(request.grid)
    if (number := math.prod(map(len, grid.values()))) > MOST_RUNS:
        raise InputError(f"sweep: expected at most {MOST_RUNS:,} runs, found a grid of {number:,}; give fewer values")
    rows = (dict(zip(grid, row, strict=True)) for row in itertools.product(*grid.values()))
    found = [Combination(_name(values), values) for values in rows]
    return list({combination.name: combination for combination in found}.values())


def _parsed(grid: Sequence[str]) -> dict[str, list[str]]:
    """Return a dict from each key of the grid to its values as YAML text."""
    if not grid:
        raise InputError("sweep: expected at least one --grid KEY=VALUE,VALUE, such as optimizer.learning_rate=1e-3,3e-3, found none")
    parsed: dict[str, list[str]] = {}
    for item in grid:
        key, equals, text = item.partition("=")
        if not equals or not key or not text:
            raise InputError(f"--grid {item}: expected KEY=VALUE,VALUE, such as optimizer.learning_rate=1e-3,3e-3; add the values")
        if key in parsed:
            raise InputError(f"--grid {item}: the key occurs twice; put all its values into one --grid, with commas")
        if key == "run.dir":
            raise InputError(
                f"--grid {item}: a sweep chooses the folder of each run; remove run.dir, or name the folder of the sweep with --dir"
            )
        parsed[key] = list(dict.fromkeys(_values(item, text)))
    return parsed


def _values(item: str, text: str) -> list[str]:
    """Return the values as YAML text in a normal form, so that equal values have equal text."""
    values = parse(
        f"[{text}]", f"--grid {item}", "put text with special characters in an extra pair of quotes, and write null for no value"
    )
    try:
        return [json.dumps(value, allow_nan=False) for value in values]  # JSON is also YAML
    except (TypeError, ValueError):
        raise InputError(
            f"--grid {item}: expected values of a config, found {text}; give numbers, text, true, false, null, lists or mappings"
        ) from None


def _name(values: Mapping[str, str]) -> str:
    """Return the name of a run: its values after the last parts of their keys, or after the whole keys if the last parts are ambiguous."""
    last = [key.rpartition(".")[2] for key in values]
    keys = last if len(set(last)) == len(last) else list(values)
    whole = ",".join(f"{key}={_plain(value)}" for key, value in zip(keys, values.values(), strict=True))
    safe = re.sub(r"[^\w.,=+-]+", "-", whole, flags=re.ASCII)
    if safe == whole and len(safe) <= _LONGEST_NAME:
        return safe
    return f"{safe[:_LONGEST_NAME]}-{hashlib.sha256(json.dumps(dict(values)).encode()).hexdigest()[:8]}"


def _plain(value: str) -> str:
    """Return a value as it is written in a name; text has no quotes."""
    data = json.loads(value)
    return data if isinstance(data, str) else value
