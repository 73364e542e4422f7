"""Write signatures and types as a person would: `Sequence[str] | None`, `jax.Array`, `ScalarOrSchedule`."""

import inspect
import itertools
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax.typing
import optax

from docs import api

_BARE = (
    "builtins",
    "typing",
    "collections.abc",
    "pathlib",
    "types",
    "jpipe",
    "jpipe_planner",
    "jpipe_train",
    "jpipe_lm",
    "pydantic",
    "jaxtyping",
)
"""Packages to leave out in front of their names; others, as in `jax.Array`, are shown."""
_ALIASES = {
    jax.typing.ArrayLike: "ArrayLike",
    jax.typing.ArrayLike | None: "ArrayLike | None",
    jax.typing.DTypeLike: "DTypeLike",
    jax.typing.DTypeLike | None: "DTypeLike | None",
    optax.ScalarOrSchedule: "optax.ScalarOrSchedule",
}
"""Unions that have a name."""


def signature(value: Callable[..., Any]) -> tuple[str, str]:
    """Return the parameters of a function or class, and what it returns, without `self`."""
    written = inspect.signature(value)
    parameters = [_parameter(p) for p in written.parameters.values() if p.name not in ("self", "cls")]
    returned = "" if isinstance(value, type) else text(written.return_annotation)
    bare = written.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return str(bare), returned


class _Text:
    """A text that `inspect.Signature` prints as it is."""

    def __init__(self, written: str) -> None:
        self.written = written

    def __repr__(self) -> str:
        return self.written


def _parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    if parameter.annotation is not inspect.Parameter.empty:
        parameter = parameter.replace(annotation=_Text(text(parameter.annotation)))
    default = repr(parameter.default)
    if default == "<factory>" or " at 0x" in default or len(default) > 40:
        parameter = parameter.replace(default=_Text("..."))
    return parameter


def text(annotation: Any) -> str:
    """Return a type as text; an empty one for no type."""
    if annotation is inspect.Signature.empty:
        return ""
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, list):  # the arguments of a Callable
        return f"[{', '.join(map(text, annotation))}]"
    if name := _alias(annotation):
        return name
    return _generic(annotation) if typing.get_origin(annotation) else _named(annotation)


def _alias(annotation: Any) -> str | None:
    return next((name for known, name in _ALIASES.items() if known == annotation), None)


def _generic(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return text(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (typing.Union, types.UnionType):
        names = [text(argument) for argument in arguments]
        return "Instruction" if {"Load", "Release"} <= set(names) else " | ".join(names)  # the union of all instructions
    if origin.__name__ == "FrozenMapping":  # what a mapping in a plan becomes
        return f"Mapping[str, {text(arguments[0])}]"
    return f"{_named(origin)}[{', '.join(map(text, arguments))}]"


def _named(value: Any) -> str:
    """Return the name of a class, with the shortest path at which its package has it."""
    name, module = getattr(value, "__qualname__", None) or repr(value), getattr(value, "__module__", "builtins")
    if any(module == bare or module.startswith(f"{bare}.") for bare in _BARE):
        return name
    parts = module.replace("jaxlib._jax", "jax").lstrip("_").replace("._src", "").split(".")
    paths = (".".join(parts[: length + 1]) for length in range(len(parts)))
    paths = itertools.chain(paths, ["jax.sharding"])  # its classes are jaxlib's
    return next((f"{path}.{name}" for path in paths if getattr(sys.modules.get(path), name, None) is value), f"{module}.{name}")


def of_variable(module: str, name: str) -> str:
    """Return the type of a variable of a module, of a property or of a field of a class, as far as it is written down."""
    owner, _, member = name.rpartition(".")
    if not owner:
        annotations = next((m.__annotations__ for m in api.modules() if name in getattr(m, "__annotations__", {})), {})
        return text(annotations.get(name, inspect.Signature.empty))
    described: Any = sys.modules[module]
    for part in owner.split("."):
        described = getattr(described, part)
    value = inspect.getattr_static(described, member, None)
    function = value.fget if isinstance(value, property) else getattr(value, "func", None)  # of a cached property
    if function is not None:
        return text(inspect.signature(function).return_annotation)
    for base in described.__mro__:
        if member in (annotations := inspect.get_annotations(base)):
            return text(annotations[member])
    return ""
