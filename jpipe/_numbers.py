"""Numbers of Python and of NumPy as arguments."""

from numbers import Integral, Real
from typing import Annotated, Any

import numpy as np
import pydantic


def is_int(value: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number of Python or NumPy, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_python(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number, and return any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def even_numbers(total: int, parts: int) -> tuple[int, ...]:
    """Divide `total` into integers that differ by at most 1, one for each part; the first parts are the larger ones."""
    size, remainder = divmod(total, parts)
    return tuple(size + (part < remainder) for part in range(parts))


Int = Annotated[int, pydantic.BeforeValidator(as_python)]
"""An integer of Python or NumPy; validation converts it to a Python integer."""

Float = Annotated[float, pydantic.BeforeValidator(as_python)]
"""A number of Python or NumPy; validation converts it to a Python float."""
