"""Find the keys with different values in the configs of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from jpipe_train.config.config_file import texts_of

MISSING = "–"
"""The text that stands for the value of a key that a config does not have."""

_OF_THE_FOLDER = "run.dir"  # it always differs, and the name of the run shows it


def table(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return for each dotted key with differing values its value in each config as text, in the order of the first config that has it."""
    texts = [texts_of(config) for config in configs]
    every = dict.fromkeys(key for text in texts for key in text if key != _OF_THE_FOLDER)
    rows = {key: [text.get(key, MISSING) for text in texts] for key in every}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def without_missing_plans(rows: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Remove the plan keys that differ only because a run with a plan file has them in that file."""
    if {*rows.get("plan.file", ())} <= {MISSING, "null"}:  # no run has a plan file
        return dict(rows)
    return {key: values for key, values in rows.items() if not key.startswith("plan.") or len({*values} - {MISSING}) > 1}
