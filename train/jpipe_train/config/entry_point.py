"""Code of the user's own, named in a config as `module:function`: imported and called; its mistakes are reported in one line.

Nothing here asks whether that is allowed: `jpipe_train.config.config_file.load` refuses such a config unless a person says otherwise.
"""

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jpipe
from jpipe import InputError
from jpipe.errors import nearest
from jpipe_train.config.arguments import check_names, parameters_of
from jpipe_train.console import interrupt

_OUR_PACKAGES = ("jpipe", "jpipe_planner", "jpipe_train")
_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NOT_THE_USERS = (
    "<",  # of no file
    *(str(package) + os.sep for package in (Path(__file__).parents[1], Path(jpipe.__file__).parent)),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def check_form(target: str) -> str:
    """The target as it is, or a ValueError if it is not written as `module:function`."""
    if not _FORM.fullmatch(target):
        raise ValueError(f"expected module:function, such as my_models:conv_net, found {target!r}")
    return target


def load(target: str, key: str) -> Callable[..., Any]:
    """The function or class `target` of a module in the current folder or an installed package.

    Args:
        target: `module:function`.
        key: the key of the config that names it, for messages.

    Raises:
        InputError: no such module or function, a module that fails when it is imported, something that is no function of a
            module of the user's (`os:system`, a constant).
    """
    module_name, _, name = target.partition(":")
    package = module_name.split(".")[0]
    if package in _OUR_PACKAGES:
        raise InputError(
            f"{key}: expected a function of your own, found '{target}', and '{package}' is a package of jpipe's; rename your module"
        )
    if package in sys.stdlib_module_names:
        raise InputError(
            f"{key}: expected a function of your own, found '{target}' of Python's standard library; name a module that is none of Python's"
        )
    with reported(f"{key}: the module '{module_name}' fails when it is imported"), _current_folder_first():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # it is there, and imports something that is not
            raise InputError(
                f"{key}: there is no module '{error.name}' for '{target}' in the current folder {Path.cwd()} "
                "or among the installed packages; correct the name, or start jpipe in the folder of the module"
            ) from None
    functions = [other for other, value in vars(module).items() if _is_function(value) and not other.startswith("_")]
    if name not in vars(module):
        hint = nearest(name, functions) if functions else "it has none"
        raise InputError(f"{key}: the module '{module_name}' has no function '{name}'; {hint}")
    if not _is_function(value := vars(module)[name]):
        raise InputError(
            f"{key}: expected a function or class written in Python, found '{target}', a {type(value).__name__}; name a function"
        )
    return value


def call(
    target: str,
    key: str,
    arguments: Mapping[str, Any],
    filled: Mapping[str, Any] | None = None,
    offered: Mapping[str, Any] | None = None,
) -> Any:
    """Call the function `target` and return its result.

    Args:
        target: `module:function`.
        key: the key of the config that names it, for messages.
        arguments: those of the config.
        filled: those that jpipe gives.
        offered: those that jpipe gives to a function that has a parameter of that name, unless the config does.

    Raises:
        InputError: as `load`; arguments that do not fit; an exception in the function, with the line of the user's that raised it.
    """
    function = load(target, key)
    parameters = parameters_of(function)
    wanted = {name: value for name, value in (offered or {}).items() if name in parameters and name not in arguments}
    filled = {**wanted, **(filled or {})}
    with placed(f"{key.rpartition('.')[0]}.arguments"):
        check_names(function, target, arguments, dict.fromkeys(filled, "is given by jpipe"))
    with reported(f"{key}: '{target}' fails"):
        return function(**filled, **arguments)


@contextmanager
def placed(key: str) -> Iterator[None]:
    """A ValueError from inside becomes an InputError about `key`."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Whatever the user's code raises inside becomes one line: `what`, the exception, its first line, the user's file and line."""
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a SystemExit, or an exception of the user's that is no Exception
        interrupt.check()  # a Ctrl-C may come out as any error
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        place = _place(error)
        fix = "fix it there" if place else "fix it"
        raise InputError(f"{what}: {type(error).__name__}: {first_line}{f' ({place})' if place else ''}; {fix}") from None


def _place(error: BaseException) -> str | None:
    """`file:line` of the last frame in code of the user's, if there is one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return own[-1] if own else None


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
