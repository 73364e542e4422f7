"""Folders of runs that were never trained."""

import json
from pathlib import Path

import jpipe
from jpipe_train.config.config import Config
from jpipe_train.config.config_file import to_yaml

PLAN = jpipe.Plan.even("abcd", num_stages=2, schedule="gpipe", microbatches=2)


def rows_of(steps: int, first: float = 5.0) -> list[dict]:
    """Return the rows of a run: the loss falls from `first` to 1 less, and every second row and the last one have a validation."""
    rows = [{"step": step, "loss": first - step / steps, "seconds": 1.5 * step} for step in range(steps)]
    for row in [*rows[::2], rows[-1]]:
        row["val_loss"] = row["loss"] + 0.25
    return rows


def write_run(
    path: Path,
    rows: list[dict],
    saved: tuple[int, ...] = (),
    runs: jpipe.Plan = PLAN,
    end: tuple[int | str | None, ...] | None = None,
    **sections,
) -> Path:
    """Write the folder of a run of the plan `runs` with these rows, checkpoints, end and sections of its config; by default of 4 steps."""
    config = Config.model_validate({"train": {"steps": 4, "batch_size": 4}} | sections)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(config))
    (path / "plan.json").write_text(runs.to_json())
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if end is not None:
        names = "steps", "length", "stopped_early", "stopped_by"
        (path / "end.json").write_text(json.dumps({"format": "jpipe-end/1", **dict(zip(names, end, strict=False))}))
    for step in saved:
        (path / "checkpoints" / str(step)).mkdir(parents=True)
        (path / "checkpoints" / str(step) / "checkpoint.json").touch()
    return path
