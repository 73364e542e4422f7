"""Read and write unambiguous YAML: plain data without duplicate keys and without values that YAML versions read differently."""

import math
import re
from typing import Any

import yaml

from jpipe import InputError

__all__ = ["dump", "parse"]


def parse(text: str, where: str, remedy: str = "correct the text") -> Any:
    """Parse YAML into plain data. `1e-3` is a number.

    Raise InputError if the text is not YAML (with line and column), has more than 20,000 values, a key twice, or a value that can be read
    in two ways (`010`, `yes`). The message ends with `remedy`.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = str(error.problem or error.context)
        if what.startswith("but "):  # PyYAML begins the second half of its sentence like this
            what = f"{error.context}, {what}"
        raise InputError(f"{where}{at}: this YAML cannot be read: {what}; {remedy}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        at = f", line {len(before)}, column {len(before[-1]) + 1}"
        raise InputError(f"{where}{at}: this YAML cannot be read: found character #x{error.character:02x}; {remedy}") from None


def dump(data: Any) -> str:
    """Write plain data as YAML that `parse` reads back unchanged: text that looks like a number is quoted, and there are no aliases."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without anchors, aliases (a few can make gigabytes), tags and ambiguous values."""

    _depth = _values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        for name, description in (("anchor", "an anchor or alias (& or *)"), ("tag", "a tag (!)")):
            if getattr(event, name, None) is not None:
                raise yaml.composer.ComposerError(problem=f"expected a plain value, found {description}", problem_mark=event.start_mark)
        self._depth += 1
        self._values += 1
        if self._depth > _DEEPEST:
            raise yaml.composer.ComposerError(problem="nested too deeply", problem_mark=event.start_mark)
        if self._values > _MOST_VALUES:
            raise yaml.composer.ComposerError(problem=f"more than {_MOST_VALUES:,} values", problem_mark=event.start_mark)
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
            raise yaml.constructor.ConstructorError(problem=f"the key '{second.value}' occurs twice", problem_mark=second.start_mark)
        return mapping


_OCTAL = re.compile(r"[-+]?0o?[0-9_]+$")
_DEEPEST = 50  # levels of nesting; with far more levels, functions that use the data would exhaust Python's stack
_MOST_VALUES = 20_000  # values and keys; PyYAML takes two seconds to read these, and no config has that many


def _reads_in_two_ways(node: yaml.ScalarNode) -> bool:
    """Return whether YAML 1.1, which PyYAML follows, reads an unquoted word in a surprising way that differs from YAML 1.2.

    Examples of YAML 1.1: `no` is false, 010 is 8, 1:30 is 90, 2001-01-01 is a date, 0o10 is text.
    """
    kind = node.tag.rpartition(":")[2]
    return (
        kind in ("timestamp", "merge", "value")
        or (kind == "bool" and node.value.lower() not in ("true", "false"))
        or (kind in ("int", "float") and ":" in node.value)
        or (node.style is None and _OCTAL.fullmatch(node.value) is not None)
    )


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Read a number, or raise an error if it is infinite or does not fit into an array."""
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


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, with the numbers that `_Loader` recognizes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML 1.1 reads `1e-3` and `-.5` as text, but users mean numbers.
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$")
for _reader_or_writer in (_Loader, _Dumper):
    _reader_or_writer.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _OCTAL, list("-+0"))  # numbers in YAML 1.2; without quotes `_Loader` rejects them
