"""Import and call the user's functions that a config names as `module:function`, and report their errors in one line.

This module does not check permission: `jpipe_train.config.config_file.load` rejects such a config unless the user allows it.
"""

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jpipe
from jpipe import InputError
from jpipe.errors import nearest
from jpipe_train.config.functions.arguments import check_names, parameters_of
from jpipe_train.console import interrupt

_OUR_PACKAGES = ("jpipe", "jpipe_planner", "jpipe_train", "jpipe_lm")
IN_PYTHON = "python"
"""The word in place of a module's name for an object that exists only in a Python program."""
_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NOT_USER_CODE = (
    "<",  # code without a file
    *(str(package) + os.sep for package in (Path(jpipe.__file__).parent, *(Path(__file__).parents[3] / name for name in _OUR_PACKAGES))),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def name_in_python(part: str) -> str:
    """Return the target for a part of a run that `jpipe_train.fit` got as an object. It can be compared but not imported."""
    return f"{IN_PYTHON}:{part}"


def check_form(target: str) -> str:
    """Return the target unchanged, or raise ValueError if it is not written as `module:function`."""
    if not _FORM.fullmatch(target):
        raise ValueError(f"expected module:function, such as my_models:conv_net, found {target!r}")
    return target


def load(target: str, key: str) -> Callable[..., Any]:
    """Import the function or class `module:function` from a module in the current folder or from an installed package.

    Raise InputError if the module or function does not exist, importing the module fails, or the target is not a function or class of the
    user's (`os:system`, a constant).
    """
    module_name, _, name = target.partition(":")
    package = module_name.split(".")[0]
    if module_name == IN_PYTHON:
        raise InputError(
            f"{key}: expected a function, found '{target}', an object of the program that called jpipe_train.fit; name a function "
            "that returns this object, as module:function"
        )
    if package in _OUR_PACKAGES:
        raise InputError(
            f"{key}: expected a function of your own, found '{target}', but '{package}' is a package of jpipe; rename your module"
        )
    if package in sys.stdlib_module_names:
        raise InputError(
            f"{key}: expected a function of your own, found '{target}' of Python's standard library; name a module of your own"
        )
    with user_errors(f"{key}: the module '{module_name}' fails when it is imported"), _current_folder_first():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but imports a module that does not
            raise InputError(
                f"{key}: the module '{error.name}' of '{target}' is neither in the current folder {Path.cwd()} "
                "nor among the installed packages; correct the name, or start jpipe in the folder of the module"
            ) from None
    functions = [other for other, value in vars(module).items() if _is_function(value) and not other.startswith("_")]
    if name not in vars(module):
        hint = nearest(name, functions) if functions else "it has no functions"
        raise InputError(f"{key}: the module '{module_name}' has no function '{name}'; {hint}")
    if not _is_function(value := vars(module)[name]):
        raise InputError(
            f"{key}: expected a function or class written in Python, found '{target}', a {type(value).__name__}; name a function"
        )
    return value


def checked(target: str, key: str, arguments: Mapping[str, Any], supplied: Iterable[str]) -> Callable[..., Any]:
    """Import the function `target` and check that it accepts the config's `arguments` and jpipe's `supplied` arguments.

    Raise the InputErrors of `load`, or one if the function does not accept the arguments.
    """
    function = load(target, key)
    with errors_about(f"{key.rpartition('.')[0]}.arguments"):
        check_names(function, target, arguments, dict.fromkeys(supplied, "is given by jpipe"))
    return function


def call(
    target: str,
    key: str,
    arguments: Mapping[str, Any],
    supplied: Mapping[str, Any] | None = None,
    optional: Mapping[str, Any] | None = None,
) -> Any:
    """Call the function `module:function` with arguments from the config and from jpipe, and return its result.

    The `optional` ones are passed if the function has a parameter of that name and the config does not set it. Raise the InputErrors of
    `load`, or one if the function does not accept the arguments or raises an exception; the message then gives the line in the user's code.
    """
    parameters = parameters_of(load(target, key))
    wanted = {name: value for name, value in (optional or {}).items() if name in parameters and name not in arguments}
    supplied = {**wanted, **(supplied or {})}
    function = checked(target, key, arguments, supplied)
    with user_errors(f"{key}: '{target}' fails"):
        return function(**supplied, **arguments)


@contextmanager
def errors_about(key: str) -> Iterator[None]:
    """Turn a ValueError raised in this context into an InputError about `key`."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Convert an exception of the user's code in this context into one line: `what`, the exception, its message, file and line."""
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit and exceptions that do not derive from Exception
        interrupt.check()  # a Ctrl-C can surface as any error
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        location = _location(error)
        fix = "fix it there" if location else "fix it"
        raise InputError(f"{what}: {type(error).__name__}: {first_line}{f' ({location})' if location else ''}; {fix}") from None


def _location(error: BaseException) -> str | None:
    """Return `file:line` of the last frame in the user's code, or None."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_user = [f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(_NOT_USER_CODE)]
    return frames_of_user[-1] if frames_of_user else None


def _is_function(value: Any) -> bool:
    return inspect.isclass(value) or (callable(value) and inspect.isfunction(inspect.unwrap(value)))


@contextmanager
def _current_folder_first() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
