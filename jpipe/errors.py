"""The errors that jpipe raises, and the form of their messages: where, expected, found, what to change."""

import difflib
import reprlib
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import pydantic

__all__ = ["MISSING", "Problem", "explain", "nearest", "problems_of", "short", "shortened"]  # the listed errors are jpipe's own


class Problem(NamedTuple):
    """One problem with an input; its text is `where: key: expected …, found …; change`.

    Attributes:
        what: what is wrong, in place of `expected`.
        where: the input: a file, an argument, a key of a config.
        key: the part of the input, such as `stages.0.layers`.
        expected: what was expected.
        found: what was found.
        change: what to change.
    """

    what: str = ""
    where: str = ""
    key: str = ""
    expected: str = ""
    found: str = ""
    change: str = ""

    def text(self) -> str:
        """Return the problem in one sentence."""
        words = (self.what or f"expected {self.expected}") + (f", found {self.found}" if self.found else "")
        return ": ".join(filter(None, (self.where, self.key, words))) + (f"; {self.change}" if self.change else "")

    def renamed(self, names: Mapping[str, str]) -> "Problem":
        """Return the problem with its place (`where` or `where.key`) renamed as in `names`. In `outer: inner` only `outer` is renamed."""
        first, _, rest = self.key.partition(".")
        if (place := names.get(f"{self.where}.{first}")) is not None:
            return self._replace(where=place + (f".{rest}" if rest else ""), key="")
        outer, colon, inner = self.where.partition(": ")
        return self._replace(where=names.get(outer, outer) + colon + inner)


class InputError(ValueError):
    """An invalid input; the message says where, what was expected, what was found and what to change.

    The raising code may name a place that the user does not know, such as an argument that a config key has set. Code that knows a better
    name sets it with `at` or `renamed`, instead of editing the text.

    Args:
        problems: for each line of the message a `Problem`, or a sentence that says what is wrong. Characters that are not printable are
            escaped, so that untrusted text cannot add lines or control a terminal. Long lines are cut in the middle, and only the first 200
            of many lines are shown.
        where: as in `Problem`; this argument and the following ones describe a single problem.
        key: the part of the input.
        expected: what was expected.
        found: what was found.
        change: what to change.

    Attributes:
        problems: the problems, one for each line of the message.
    """

    def __init__(
        self, *problems: str | Problem, where: object = "", key: object = "", expected: str = "", found: object = "", change: str = ""
    ) -> None:
        super().__init__()
        listed = problems or ("",)
        fields = str(where), str(key), expected, str(found), change
        self._set([problem if isinstance(problem, Problem) else Problem(problem, *fields) for problem in listed])

    def _set(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [problem.text() for problem in problems]
        shown = (*lines[:_MOST_LINES], f"… and {len(lines) - _MOST_LINES} more") if len(lines) > _MOST_LINES + 1 else lines
        self.args = tuple(_printable(_cut(line)) for line in shown)

    def __str__(self) -> str:
        return "\n".join(self.args)

    def _with(self, problems: Sequence[Problem]) -> Self:
        error = type(self).__new__(type(self))
        error.__dict__.update(self.__dict__)
        error._set(problems)
        return error

    def at(self, where: str) -> Self:
        """Return this error with `where` as the input of all its problems."""
        return self._with([problem._replace(where=where) for problem in self.problems])

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return this error with its places renamed.

        Args:
            names: the name to print for each place, `where` or `where.key`.
        """
        return self._with([problem.renamed(names) for problem in self.problems])

    def with_change(self, change: str) -> Self:
        """Return this error with the caller's advice on what to change; "" removes the advice."""
        return self._with([problem._replace(change=change) for problem in self.problems])


_MOST_LINES = 200
_BEGIN, _END = 700, 300  # how many characters of a long line are kept


def _printable(text: str) -> str:
    """Return the text with characters that are not printable escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cut(line: str) -> str:
    """Cut a long line in the middle, because its end says what to change."""
    return line if len(line) <= _BEGIN + _END else f"{line[:_BEGIN]}…{line[-_END:]}"


class PeerLost(RuntimeError):
    """A process of the run died, hung or stopped. The message says which one, how it ended and what this process waited for."""


def cause(error: BaseException) -> str:
    """Describe an exception in the caller's code and its place in one line, such as `KeyError: 'mask' (losses.py:12)`.

    Args:
        error: the exception, with its traceback.

    Returns:
        The exception's name, the first line of its message, and file and line of the last frame in the caller's code. If no frame is in a
        file of the caller's, file and line are left out.

    Example:
        >>> cause(ValueError("no rows"))
        'ValueError: no rows'
    """
    what = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    locations = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__) if _is_the_callers(frame)]
    return f"{what} ({locations[-1]})" if locations else what


@contextmanager
def callers_code(message: Callable[[BaseException], str | Problem]) -> Iterator[None]:
    """Convert exceptions of the caller's code into `InputError`s with this message (see `cause`). Ctrl-C and `InputError` pass."""
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit, and the caller's exceptions that are not derived from Exception
        raise InputError(message(error)) from error


_LIBRARIES = {"jpipe", "jax", "flax", "optax"}  # wherever they are installed
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def _is_the_callers(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return not (
        path.name.startswith("<")  # the code has no file, because it was typed in or generated
        or frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES
        or _INSTALLED.intersection(path.parts)
        or any(path.is_relative_to(folder) for folder in _STANDARD_LIBRARY)
    )


def shortened(names: Sequence[str], most: int = 6) -> str:
    """Join names as `a, b, c`, with `…` in place of the middle of a long list."""
    shown = list(names) if len(names) <= most else [*names[: most - 2], "…", names[-1]]
    return ", ".join(shown)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the hint to print after an unknown name.

    Args:
        word: the unknown name.
        choices: the known names.

    Returns:
        A question that names the nearest choice, or the list of all choices if none is near.

    Example:
        >>> nearest("gpip", ["gpipe", "naive"])
        "did you mean 'gpipe'?"
    """
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names)}"


MISSING = "add it"
"""The advice about a missing key."""


def problems_of(error: ValueError) -> Sequence[Problem]:
    """Return the problems of an error that a check of a value has raised."""
    return error.problems if isinstance(error, InputError) else [Problem(str(error))]


def explain(
    error: pydantic.ValidationError, model: type[pydantic.BaseModel], where: str, shown: Callable[[Any], str] | None = None
) -> InputError:
    """Turn pydantic's report into one `InputError`, with one line per problem.

    Args:
        error: the error of a validation.
        model: the class that validated the data; unknown keys are compared with its field names.
        where: the source of the data, such as a file name; every line begins with it.
        shown: a function that returns a value as text; by default `short`.
    """
    lines: list[Problem] = []
    problems = error.errors()
    hints = {problem["loc"]: _nearest_key(model, problem["loc"]) for problem in problems if problem["type"] == "extra_forbidden"}
    for problem in problems:
        place = problem["loc"]
        if problem["type"] == "too_short" and any(other["loc"][: len(place)] == place != other["loc"] for other in problems):
            continue  # pydantic has counted only the valid items
        key = ".".join(map(str, place))
        value = problem.get("input")
        match problem["type"]:
            case "extra_forbidden":
                lines.append(Problem(f"unknown key '{key}'", where, change=hints[place]))
            case "missing" if f"did you mean '{key}'?" in hints.values():
                continue  # the key is present, but misspelt
            case "missing":
                lines.append(Problem(f"key '{key}' is missing", where, change=MISSING))
            case "too_short":
                limits = problem["ctx"]
                lines.append(Problem("", where, key, f"at least {limits['min_length']} of them", str(limits["actual_length"])))
            case "too_long":
                lines.append(Problem("", where, key, f"at most {problem['ctx']['max_length']} items", short(value)))
            case "value_error":
                for each in problems_of(problem["ctx"]["error"]):
                    lines.append(each._replace(where=where, key=": ".join(filter(None, (key, each.where, each.key)))))
            case _:
                expected = problem["msg"].removeprefix("Input should be ")
                lines.append(Problem("", where, key or "the whole", expected, (shown or short)(value)))
    return InputError(*lines)


def short(value: Any) -> str:
    """Return the value as text of at most 80 characters."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"{type(value).__name__} too long to print"
    return text if len(text) <= 80 else text[:77] + "..."


_REPR = reprlib.Repr()  # `reprlib` is fast even for large values
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def _nearest_key(model: type[pydantic.BaseModel], location: Sequence[str | int]) -> str:
    """Return the hint for the unknown key at `location`: the full path of the nearest key, which may be in another section."""
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
    """Yield the paths of all fields of a model and of its nested models."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            yield from _keys_of(field.annotation, f"{prefix}{name}.")


def _fields_at(model: type[pydantic.BaseModel], location: Sequence[str | int]) -> list[str]:
    """Return the field names of the model nested in `model` at `location`, without list positions."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        annotation = current.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        current = next((c for c in candidates if isinstance(c, type) and issubclass(c, pydantic.BaseModel)), None)
        if current is None:
            return []
    return [field.alias or name for name, field in current.model_fields.items()]
