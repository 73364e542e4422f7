"""What differs between the configs of runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MISSING = "–"
"""The text in place of the value of a key that a config does not have."""

_OF_THE_FOLDER = "run.dir"  # differs always, and is seen by the name of the run


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a config as text, by dotted key: `{"train.steps": "200"}`; without the folder of the run."""
    return {key: value for key, value in _flat(config, "") if key != _OF_THE_FOLDER}


def keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys with values that differ, in the order of the first config that has them."""
    return list(table(configs))


def table(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values of each key that differs, one for each config."""
    texts = [flat(config) for config in configs]
    every = dict.fromkeys(key for text in texts for key in text)
    rows = {key: [text.get(key, MISSING) for text in texts] for key in every}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def without_missing_plans(rows: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Leave out plan keys that are missing only in runs with a plan file: the file has all of them."""
    if {*rows.get("plan.file", ())} <= {MISSING, "null"}:  # no run has a plan file
        return dict(rows)
    return {key: values for key, values in rows.items() if not key.startswith("plan.") or len({*values} - {MISSING}) > 1}


def _flat(data: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
