"""Find the keys with different values in the configs of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from jpipe_train.config.config_file import texts_of

MISSING = "–"
"""The text that stands for the value of a key that a config does not have."""

_OF_THE_FOLDER = "run.dir"  # it always differs, and the name of the run shows it


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict from dotted keys to values as text, such as `{"train.steps": "200"}`, without the folder of the run."""
    return {key: value for key, value in texts_of(config).items() if key != _OF_THE_FOLDER}


def keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys with values that differ, in the order of the first config that has them."""
    return list(table(configs))


def table(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return for each key with differing values its value in each config."""
    texts = [flat(config) for config in configs]
    every = dict.fromkeys(key for text in texts for key in text)
    rows = {key: [text.get(key, MISSING) for text in texts] for key in every}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def without_missing_plans(rows: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Remove the plan keys that differ only because a run with a plan file has them in that file."""
    if {*rows.get("plan.file", ())} <= {MISSING, "null"}:  # no run has a plan file
        return dict(rows)
    return {key: values for key, values in rows.items() if not key.startswith("plan.") or len({*values} - {MISSING}) > 1}
