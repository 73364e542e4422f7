"""Read and write the keys of `config.json` about the head of a model that judges whole texts."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jpipe_lm.config.huggingface.families import Family

_CLASSES, _NUMBER = "single_label_classification", "regression"


class _Labels(BaseModel):
    """The keys that define the meaning of the scores. As in transformers, one label without `problem_type` means regression."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    num_labels: Annotated[int, Field(ge=1, le=10**5)] | None = None
    id2label: Annotated[dict[str, str], Field(min_length=1, max_length=10**5)] | None = None
    problem_type: Literal["single_label_classification", "regression"] | None = None

    @model_validator(mode="after")
    def _agree(self) -> "_Labels":
        count = self.count
        if self.id2label is not None and self.id2label.keys() != {str(i) for i in range(count)}:
            raise ValueError(f"expected id2label to have the keys 0 to {count - 1}, found other keys; correct id2label")
        if self.problem_type is not None and (self.problem_type == _NUMBER) != (count == 1):
            raise ValueError(f"expected {'one label' if count > 1 else 'two labels or more'} for {self.problem_type}, found {count}")
        return self

    @property
    def count(self) -> int:
        return len(self.id2label) if self.id2label is not None else 2 if self.num_labels is None else self.num_labels


SCHEMA = _Labels


def keys_of(family: Family, architecture: str, labels: _Labels) -> dict[str, Any]:
    """Return the keys of `model` about the head. A language model returns none, because any head can start from its weights."""
    head = next((head for head, name in family.judges.items() if name == architecture), "language")
    if head == "language":
        return {}
    if head == "multiple_choice":
        return {"head": head}  # the data decide the number of choices
    if labels.count == 1:
        return {"head": "regression"}
    names = [(labels.id2label or {}).get(str(i), _unnamed(i)) for i in range(labels.count)]
    return {"head": head, "labels": labels.count if names == [_unnamed(i) for i in range(labels.count)] else names}


def json_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` about the head of a model; `model` has the keys of the section `model`."""
    if model["head"] in ("language", "multiple_choice"):
        return {}
    labels = model["labels"] or 1
    names = labels if isinstance(labels, list) else [_unnamed(i) for i in range(labels)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": _NUMBER if model["head"] == "regression" else _CLASSES,
    }


def agreed(folder: Any, config: Any) -> Any:
    """Return the labels of a folder, or of the config if only the config names labels, and equally many."""
    counts = [len(labels) if isinstance(labels, list) else labels for labels in (folder, config)]
    return config if isinstance(config, list) and not isinstance(folder, list) and counts[0] == counts[1] else folder


def _unnamed(number: int) -> str:
    return f"LABEL_{number}"
