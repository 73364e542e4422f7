"""Write the table of the options of schedules, from their docstrings and from what excludes them: `python -m docs.options`."""

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import yaml
from pydantic.fields import FieldInfo

from jpipe.plan import EXCLUSIONS
from jpipe.schedules import SCHEDULES, ScheduleOptions

PAGE = Path(__file__).parent / "reference" / "config" / "plan.md"
_TABLE = re.compile(r"(?<=<!-- table: options of schedules -->\n).*?(?=<!-- end -->)", re.DOTALL)
_WORDS = {"None": "null", "True": "true", "False": "false"}


def with_table(page: str) -> str:
    """Return the page with the table, which is put in place of the one that the page has."""
    rows = [f"| `{key}` | {_meaning(key)} | {_default(key)} | {'; '.join(_limits(key))} |\n" for key in ScheduleOptions.model_fields]
    head = "| key | meaning | default | limits |\n|---|---|---|---|\n"
    return _TABLE.sub(lambda _: head + "".join(rows), page)


def _meaning(key: str) -> str:
    """Return the description of an option in the docstring of the class, with values as YAML has them and links to the pages it names."""
    described = re.search(rf"^    {key}: (.*?)(?=^    \w+: |\Z)", inspect.getdoc(ScheduleOptions) or "", re.MULTILINE | re.DOTALL)
    assert described, key
    text = re.sub(r" \S+ by default\.", "", " ".join(described[1].split())).removesuffix(".")
    text = re.sub(r'"(\w+)"|\b(None|True|False)\b', lambda word: f"`{word[1] or _WORDS[word[2]]}`", text)
    return re.sub(r"docs/([\w/-]+)\.md", lambda path: f"[{_title(path[1])}](../../{path[1]}.md)", text)


def _title(page: str) -> str:
    return (PAGE.parents[2] / f"{page}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _default(key: str) -> str:
    return f"`{yaml.safe_dump(ScheduleOptions.model_fields[key].default).splitlines()[0]}`"


def _limits(key: str) -> Iterator[str]:
    """Yield the bounds or values of an option, the schedules that have it, and what it excludes."""
    annotation = typing.get_type_hints(ScheduleOptions, include_extras=True)[key]
    values = [f"`{value}`" for value in typing.get_args(annotation)] if typing.get_origin(annotation) is Literal else []
    fields = [field for part in (annotation, *typing.get_args(annotation)) for field in getattr(part, "__metadata__", ())]
    limits = [limit for field in fields if isinstance(field, FieldInfo) for limit in field.metadata]
    bounds = [f"{sign} {getattr(limit, name)}" for sign, name in (("≥", "ge"), ("≤", "le")) for limit in limits if hasattr(limit, name)]
    if values or bounds:
        yield ", ".join(values or bounds)
    *names, last = [f"`{name}`" for name, schedule in SCHEDULES.items() if key in schedule.options]
    special = f"{values[1]} " if values else ""
    yield f"{special}only for {', '.join(names)} and {last}" if names else f"{special}only for {last}"
    others: dict[str, list[str]] = {}
    for exclusion in EXCLUSIONS:
        if key in (exclusion.option, exclusion.other):
            other = exclusion.other if key == exclusion.option else exclusion.option
            field = ScheduleOptions.model_fields.get(other)
            beside, value = ("with", f"{other}: {field.default}") if field and isinstance(field.default, str) else ("not with", other)
            others.setdefault("under a schedule that does not flush, " * exclusion.without_flush + beside, []).append(f"`{value}`")
    yield from (f"{beside} {', '.join(keys)}" for beside, keys in others.items())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
