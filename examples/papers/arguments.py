"""Checks of the arguments that a config passes to the papers' models, data and losses."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from jpipe import InputError

MODEL, DATA, LOSS = "model.arguments", "data.arguments", "loss.arguments"
"""The sections of a config that hold the arguments, for messages."""

MOST_LAYERS, MOST_SYMBOLS, MOST_WIDTH, MOST_POSITIONS, MOST_PIXELS = 1000, 10**7, 10**6, 10**5, 4096
"""The largest depth, number of words or classes, width, length of a row, and pixels per side."""


def check_integers(section: str, least: int, most: int, **arguments: object) -> None:
    """Check that arguments are integers from `least` to `most`.

    Raises:
        InputError: one is not; it is named.
    """
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InputError(f"{section}.{name}: expected an integer from {least} to {most}, found {value!r}; change it")


def check_fractions(section: str, **arguments: object) -> None:
    """Check that arguments, such as dropout rates, are numbers from 0 to less than 1.

    Raises:
        InputError: one is not; it is named.
    """
    for name, value in arguments.items():
        if not _is_number(value) or not 0 <= value < 1:
            raise InputError(f"{section}.{name}: expected a number from 0 to less than 1, found {value!r}; change it")


def check_positive(section: str, most: float, **arguments: object) -> None:
    """Check that arguments are numbers above 0, up to `most`.

    Raises:
        InputError: one is not; it is named.
    """
    for name, value in arguments.items():
        if not _is_number(value) or not 0 < value <= most:
            raise InputError(f"{section}.{name}: expected a number above 0 and at most {most:g}, found {value!r}; change it")


def check_choice(section: str, choices: tuple[object, ...], **arguments: object) -> None:
    """Check that arguments are among the choices.

    Raises:
        InputError: one is not; it is named.
    """
    for name, value in arguments.items():
        if type(value) not in map(type, choices) or value not in choices:
            raise InputError(f"{section}.{name}: expected {' or '.join(map(repr, choices))}, found {value!r}; change it")


def check_fields(model: str, data: str, inputs: Any, *names: str) -> None:
    """Check that the inputs of a model have the fields that it reads.

    Args:
        model: the name of the model.
        data: `module:function` of the data that has these fields.
        inputs: of a batch.
        names: of the fields.

    Raises:
        InputError: the data is made for another model.
    """
    if not isinstance(inputs, Mapping) or not all(name in inputs for name in names):
        fields = " and ".join(f"'{name}'" for name in names)
        raise InputError(
            f"data.target: expected inputs with {fields}, which {model} reads, such as those of {data}, found {described(inputs)}; "
            "change data.target or model.target"
        )


def described(inputs: Any) -> str:
    """Describe the inputs of a batch by their fields, or by dtype and shape."""
    if isinstance(inputs, Mapping):
        return f"the fields {', '.join(map(repr, sorted(inputs)))}"
    return f"{inputs.dtype}{list(inputs.shape)}" if hasattr(inputs, "shape") else f"a {type(inputs).__name__}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
