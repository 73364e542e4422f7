"""The heads of the built-in models, and the labels that they distinguish."""

import reprlib
from typing import Annotated, Literal

from pydantic import BeforeValidator

from jpipe import InputError

Head = Literal["language", "classification", "regression", "multiple_choice"]
_OF_LABELS = ("classification", "multiple_choice")  # the heads that distinguish labels
_MOST_LABELS, _MOST_NAMES, _LONGEST_NAME = 10**5, 1000, 256


def _checked(labels: object) -> object:
    expected = f"expected their number, 2 to {_MOST_LABELS:,}, or a list of 2 to {_MOST_NAMES:,} names"
    if isinstance(labels, list):
        if not 2 <= len(labels) <= _MOST_NAMES:
            raise InputError(f"{expected}, found {len(labels)} names")
        for name in labels:
            if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
                raise InputError(
                    expected=f"names of at most {_LONGEST_NAME} letters", found=reprlib.repr(name), change="put the name in quotes"
                )
        if twice := next((name for name in labels if labels.count(name) > 1), None):
            raise InputError(expected="each name once", found=f"{reprlib.repr(twice)} twice", change="remove one of them")
    elif labels is not None and (isinstance(labels, bool) or not isinstance(labels, int) or not 2 <= labels <= _MOST_LABELS):
        raise InputError(f"{expected}, found {reprlib.repr(labels)}")
    return labels


Labels = Annotated[int | list[str] | None, BeforeValidator(_checked)]
"""The number of labels, or their names."""


def check(head: Head, labels: int | list[str] | None) -> None:
    """Check that `labels` is set if, and only if, the head distinguishes labels."""
    if head in _OF_LABELS and labels is None:
        what = "classes" if head == "classification" else "choices of an example"
        raise InputError(f"head {head} needs labels, the number of {what} or their names", change="add labels")
    if head not in _OF_LABELS and labels is not None:
        raise InputError(f"labels has no effect with head {head}", change="remove labels, or set head to classification")
