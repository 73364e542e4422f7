"""A config as YAML text: read with `--set key=value` overrides, every mistake told as file, place, expected, found; and written back."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from jpipe import InputError, explain, nearest
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
    for override in overrides:
        _override(data, override)
    where = " ".join([str(path), *(f"--set {override}" for override in overrides)])
    try:
        config = Config.model_validate(data)
    except pydantic.ValidationError as error:
        raise explain(error, Config, where) from None
    if config.code and not allow_code:
        named = ", ".join(f"'{target}' ({key})" for key, target in config.code.items())
        raise InputError(
            f"{where}: expected built-in parts only, found code of its own to import and run: {named}; read that code, and if you trust it "
            "add --allow-code"
        )
    return config


def to_yaml(config: Config) -> str:
    """The config with every default filled in; `load` of this text gives an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def parse(text: str, where: str, remedy: str = "correct the text there") -> Any:
    """YAML to plain data; a key given twice is an error, and `1e-3` is a number.

    Raises:
        InputError: text that is not YAML, with line and column; it ends in `remedy`.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{where}{at}: this is not YAML as it should be: {error.problem or error.context}; {remedy}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # characters that YAML does not allow; a date such as 2001-99-99
        raise InputError(f"{where}: this is not YAML as it should be: {str(error).splitlines()[0]}; {remedy}") from None
    except RecursionError:
        raise InputError(f"{where}: this is not YAML as it should be: nested too deeply; {remedy}") from None


def _override(data: dict[str, Any], override: str) -> None:
    """Put the value of `section.key=value` into `data`."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise InputError(f"--set {override}: expected key=value, such as train.steps=100, found no '='")
    *sections, last = key.split(".")
    for depth, section in enumerate(sections):
        inner = data.setdefault(section, {})
        if inner is None:  # `run:` with nothing below it
            inner = data[section] = {}
        if not isinstance(inner, dict):
            name = ".".join(sections[: depth + 1])
            raise InputError(f"--set {override}: '{name}' is a value, not a section; {nearest(name, Config.model_fields)}")
        data = inner
    data[last] = parse(value, f"--set {override}", "put text with special characters in quotes of its own")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader (plain data only), refusing duplicate keys, anchors, aliases (a few make gigabytes) and tags."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        for name, found in (("anchor", "an anchor or alias (& or *)"), ("tag", "a tag (!)")):
            if getattr(event, name, None) is not None:
                raise yaml.composer.ComposerError(problem=f"expected a plain value, found {found}", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key '{key_node.value}' is there twice", problem_mark=key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML follows, reads `1e-3` as text; everyone means the number.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))
