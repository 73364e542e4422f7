"""A config as YAML text: read with `--set key=value` overrides, every mistake told as file, place, expected, found; and written back."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from jpipe import InputError, explain
from train.config import Config


def load(path: str | Path, overrides: Sequence[str] = (), *, allow_code: bool = False) -> Config:
    """Read the YAML file at `path`, replace the keys of `overrides` (`"train.steps=10"`, the value being YAML too) and validate.

    Args:
        path: the file.
        overrides: what replaces keys of it.
        allow_code: whether the config may name functions to import and call. A file from a stranger must not, so only a person says so.

    Raises:
        InputError: a file that cannot be read or parsed, an unknown key (names the nearest), a wrong type or value, code not allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read the config: {error.strerror}; give a YAML file such as configs/gpt-bytes.yaml") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected YAML text in UTF-8, found other bytes; is this a config?") from None
    data = parse(text, str(path))
    if data is None:  # an empty file: all defaults
        data = {}
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of keys such as 'train:', found {type(data).__name__}")
    if str(data.get("format")).startswith("jpipe-plan/"):
        raise InputError(f"{path}: expected a config, found a plan; name it in a config, as plan.file, or look at it with jpipe simulate")
    given: list[str] = []
    for override in overrides:
        _override(data, override, given)
    where = " ".join([str(path), *(f"--set {override}" for override in overrides)])
    try:
        config = Config.model_validate(data)
    except pydantic.ValidationError as error:
        raise explain(error, Config, where) from None
    if config.plan.file is not None:
        for override, key in zip(overrides, given, strict=True):
            if set(data["plan"]) != {"file"} if key == "plan" else key.startswith("plan.") and key != "plan.file":
                raise InputError(
                    f"--set {override}: would mean nothing beside plan.file '{config.plan.file}'; leave it out, or change the plan file"
                )
    if config.code and not allow_code:
        named = ", ".join(f"'{target}' ({key})" for key, target in config.code.items())
        raise InputError(
            f"{where}: expected built-in parts only, found code of its own to import and run: {named}; read that code, and if you trust it "
            "add --allow-code"
        )
    return config


def to_yaml(config: Config) -> str:
    """The config with every default filled in; `load` of this text gives one of the same run.

    It is equal to this one, unless a `plan.file` replaces the other keys of `plan`: then they are left out.
    """
    data = config.model_dump()
    if config.plan.file is not None:
        data["plan"] = {"file": config.plan.file}
    return yaml.safe_dump(data, sort_keys=False)


def parse(text: str, where: str, remedy: str = "correct the text there") -> Any:
    """YAML to plain data; `1e-3` is a number, and a key given twice or a value that can be read in two ways (`010`, `yes`) an error.

    Raises:
        InputError: text that is not YAML, with line and column; it ends in `remedy`.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = str(error.problem or error.context)
        if what.startswith("but "):  # the second half of a sentence
            what = f"{error.context}, {what}"
        raise InputError(f"{where}{at}: this is not YAML as it should be: {what}; {remedy}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        at = f", line {len(before)}, column {len(before[-1]) + 1}"
        raise InputError(f"{where}{at}: this is not YAML as it should be: found character #x{error.character:02x}; {remedy}") from None


def _override(data: dict[Any, Any], override: str, given: list[str]) -> None:
    """Put the value of `section.key=value` into `data`, unless that undoes one of the keys `given` before; adds its own to them."""
    key, equals, value = override.partition("=")
    *sections, last = key.split(".")
    if not equals or not all([*sections, last]):
        found = "an empty name" if equals else "no '='"
        raise InputError(f"--set {override}: expected key=value, such as train.steps=100, found {found}")
    for other in given:
        if f"{other}.".startswith(f"{key}."):
            raise InputError(f"--set {override}: expected each key once, found --set {other}=… before it, which would be lost; keep one")
    given.append(key)
    for depth, section in enumerate(sections):
        inner = data.setdefault(section, {})
        if inner is None:  # `run:` with nothing below it
            inner = data[section] = {}
        if not isinstance(inner, dict):
            name = ".".join(sections[: depth + 1])
            raise InputError(f"--set {override}: '{name}' is a value, not a section; give the whole of it, as {name}=…")
        data = inner
    data[last] = parse(value, f"--set {override}", "put text with special characters in quotes of its own")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader (plain data only), refusing anchors, aliases (a few make gigabytes), tags, and what may be misunderstood."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        for name, found in (("anchor", "an anchor or alias (& or *)"), ("tag", "a tag (!)")):
            if getattr(event, name, None) is not None:
                raise yaml.composer.ComposerError(problem=f"expected a plain value, found {found}", problem_mark=event.start_mark)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.composer.ComposerError(problem="nested too deeply", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and _reads_in_two_ways(node):
            raise yaml.composer.ComposerError(
                problem=f"'{node.value}' can be read in two ways; write true, false or a plain number, or put it in quotes if it is text",
                problem_mark=node.start_mark,
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [self.construct_object(key_node, deep=True) for key_node, _ in node.value]
            second = next(node.value[i][0] for i, key in enumerate(keys) if key in keys[:i])
            raise yaml.constructor.ConstructorError(problem=f"the key '{second.value}' is there twice", problem_mark=second.start_mark)
        return mapping


_DEEPEST = 50  # levels; far more would exhaust Python's stack in those who use the data


def _reads_in_two_ways(node: yaml.ScalarNode) -> bool:
    """Whether YAML 1.1, which PyYAML follows, makes of a word without quotes what few expect, and YAML 1.2 something else.

    `no` is false, 010 is 8, 1:30 is 90, 2001-01-01 is a date, 0o10 is text.
    """
    kind = node.tag.rpartition(":")[2]
    return (
        kind in ("timestamp", "merge", "value")
        or (kind == "bool" and node.value.lower() not in ("true", "false"))
        or (kind in ("int", "float") and ":" in node.value)
        or (node.style is None and re.fullmatch(r"[-+]?0o?[0-9_]+", node.value) is not None)
    )


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """A number, unless it is one that would become infinite or that no array can hold."""
    whole = node.tag.endswith(":int")
    try:
        number = loader.construct_yaml_int(node) if whole else loader.construct_yaml_float(node)
    except ValueError:  # `0x_`; thousands of digits
        number = math.inf
    if abs(number) >= 2**64 if whole else (math.isinf(number) and "inf" not in node.value.lower()):
        raise yaml.constructor.ConstructorError(problem="expected a number of at most 64 bits", problem_mark=node.start_mark)
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
# YAML 1.1 reads `1e-3` and `-.5` as text; everyone means the number.
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
