"""Numbers of Python and of NumPy as arguments."""

from numbers import Integral, Real
from typing import Annotated, Any

import numpy as np
import pydantic


def is_int(value: Any) -> bool:
    """Return whether a value is an integer, Python's or NumPy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, Python's or NumPy's, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_python(value: Any) -> Any:
    """Return a number of NumPy as one of Python, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def even_numbers(total: int, parts: int) -> tuple[int, ...]:
    """Return as many even numbers as there are parts, with this sum; the first ones take the remainder."""
    size, remainder = divmod(total, parts)
    return tuple(size + (part < remainder) for part in range(parts))


Int = Annotated[int, pydantic.BeforeValidator(as_python)]
"""An integer, Python's or NumPy's; in a JSON file Python's."""

Float = Annotated[float, pydantic.BeforeValidator(as_python)]
"""A number, Python's or NumPy's; in a JSON file Python's."""
