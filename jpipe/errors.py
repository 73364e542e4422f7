"""The errors that jpipe raises, and the form of their messages: where, expected, found, what to change."""

import difflib
import reprlib
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pydantic

__all__ = ["explain", "nearest"]  # the others are in jpipe itself


class InputError(ValueError):
    """Something the caller gave does not fit: the message says where, what was expected, what was found, what to change.

    Args:
        lines: one for each problem. A line stays a line, and text of a stranger's in it cannot drive a terminal: what is not
            printable is written as an escape.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines))

    def __str__(self) -> str:
        return "\n".join(self.args)


class PeerLost(RuntimeError):
    """A process of the run died, hung or stopped: the message names it, how, and what this process was waiting for, in one line."""


def cause(error: BaseException) -> str:
    """What a caller's own code raised, in one line, and where: `KeyError: 'mask' (losses.py:12)`.

    Args:
        error: as it was caught; its traceback says where.

    Returns:
        The exception's name, the first line of its message, and file and line of the last frame in the caller's own code; without
        the place where there is none: libraries found the mistake, or the code was typed in.

    Example:
        >>> cause(ValueError("no rows"))
        'ValueError: no rows'
    """
    what = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    own = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__) if _is_the_callers(frame)]
    return f"{what} ({own[-1]})" if own else what


@contextmanager
def callers_code(message: Callable[[BaseException], str]) -> Iterator[None]:
    """Whatever a caller's own code raises inside becomes an `InputError`, but for Ctrl-C and what is one already.

    Args:
        message: makes the message of the exception; see `cause`.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a SystemExit, or an exception of the caller's that is no Exception
        raise InputError(message(error)) from error


_LIBRARIES = {"jpipe", "jax", "flax", "optax"}  # wherever they are installed
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def _is_the_callers(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return not (
        path.name.startswith("<")  # no file: typed in, or made by a library
        or frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES
        or _INSTALLED.intersection(path.parts)
        or any(path.is_relative_to(folder) for folder in _STANDARD_LIBRARY)
    )


def shortened(names: Sequence[str], most: int = 6) -> str:
    """`a, b, c`, with a mark in place of what is in the middle of a long list."""
    shown = list(names) if len(names) <= most else [*names[: most - 2], "…", names[-1]]
    return ", ".join(shown)


def nearest(word: str, choices: Iterable[str]) -> str:
    """The hint to print after an unknown word.

    Args:
        word: what was found.
        choices: what is known.

    Returns:
        A question that names the nearest choice, or, when none is near, the list of all.

    Example:
        >>> nearest("gpip", ["gpipe", "naive"])
        "did you mean 'gpipe'?"
    """
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names)}"


def explain(error: pydantic.ValidationError, model: type[pydantic.BaseModel], where: str) -> InputError:
    """Turn pydantic's report into one `InputError`, a line a problem.

    Args:
        error: what a validation raised.
        model: the class whose data was validated; its field names are what an unknown key is compared with.
        where: where the data came from (a file name, say); every line begins with it.
    """
    lines = []
    problems = error.errors()
    hints = {problem["loc"]: _nearest_key(model, problem["loc"]) for problem in problems if problem["type"] == "extra_forbidden"}
    for problem in problems:
        if problem["type"] == "too_short" and any(_is_inside(other["loc"], problem["loc"]) for other in problems):
            continue  # it counted only the items that have no problem of their own
        at = ".".join(str(part) for part in problem["loc"])
        found = problem.get("input")
        match problem["type"]:
            case "extra_forbidden":
                lines.append(f"{where}: unknown key '{at}'; {hints[problem['loc']]}")
            case "missing" if f"did you mean '{at}'?" in hints.values():
                continue  # it is there, misspelt
            case "missing":
                lines.append(f"{where}: key '{at}' is missing; add it")
            case "too_short":
                limits = problem["ctx"]
                lines.append(f"{where}: {at}: expected at least {limits['min_length']} of them, found {limits['actual_length']}")
            case "value_error":
                lines.append(f"{where}: {at + ': ' if at else ''}{problem['ctx']['error']}")
            case _:
                expected = problem["msg"].removeprefix("Input should be ")
                lines.append(f"{where}: {at or 'the whole'}: expected {expected}, found {short(found)}")
    return InputError(*lines)


def _is_inside(location: Sequence[str | int], outer: Sequence[str | int]) -> bool:
    return len(location) > len(outer) and tuple(location[: len(outer)]) == tuple(outer)


def short(value: Any) -> str:
    """The value in at most 80 characters."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"{type(value).__name__} too long to print"
    return text if len(text) <= 80 else text[:77] + "..."


_REPR = reprlib.Repr()  # its time does not grow with the value
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def _nearest_key(model: type[pydantic.BaseModel], location: Sequence[str | int]) -> str:
    """The hint after the unknown key at `location`: the full path of the key that was meant, even if it belongs elsewhere."""
    key, last, inside = ".".join(map(str, location)), str(location[-1]), location[:-1]
    siblings = _fields_at(model, inside)
    known = [*(".".join(map(str, (*inside, field))) for field in siblings), *_keys_of(model)]
    if key in known:
        section, _, name = last.rpartition(".")
        return f"write '{name}' inside of '{section}', without the dot"
    similar = [other for other in known if _likeness(last, other.rpartition(".")[2]) >= 0.5]
    return f"did you mean '{max(similar, key=lambda other: _likeness(key, other))}'?" if similar else nearest(last, siblings)


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word.casefold(), other.casefold()).ratio()


def _keys_of(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[str]:
    """The paths of all fields of a model and of the models in it."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            yield from _keys_of(field.annotation, f"{prefix}{name}.")


def _fields_at(model: type[pydantic.BaseModel], location: Sequence[str | int]) -> list[str]:
    """Names of the fields of the model nested in `model` at `location` (list positions are passed over)."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        annotation = current.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        current = next((c for c in candidates if isinstance(c, type) and issubclass(c, pydantic.BaseModel)), None)
        if current is None:
            return []
    return list(current.model_fields)
