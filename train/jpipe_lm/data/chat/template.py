"""Find the chat template of a tokenizer, in a file that a config names or next to the tokenizer.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import read_text
from jpipe_lm.data.tokenizer import Tokenizer
from jpipe_train.data.files.saved_datasets import json_object
from jpipe_train.data.sources import readable
from jpipe_train.registry import located

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
LEGACY = "chat_template.json"
SETTINGS = "tokenizer_config.json"
MOST_BYTES = 2**20  # the largest size of a template; known templates have at most a hundredth of this
_MOST_TEMPLATES = 100
_MOST_SETTINGS = 2**26  # the most bytes of a tokenizer_config.json, which may list all special tokens of a large vocabulary
_DEFAULT, _WITH_TOOLS = "default", "tool_use"


@dataclass(frozen=True)
class Template:
    """A chat template, which may come from a stranger."""

    sources: Mapping[str, str]  # a mapping from names of templates to their text. A single template has the name `default`.
    variables: Mapping[str, str]  # the special tokens that templates may use, such as bos_token
    where: str  # the file that the templates were read from, for messages

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of a tokenizer_config.json about this template."""
        named = [{"name": name, "template": source} for name, source in self.sources.items()]
        return {**self.variables, "chat_template": named if len(named) > 1 else self.source()}

    def source(self, *, with_tools: bool = False) -> str:
        """Return the template for conversations with or without tools."""
        name = _WITH_TOOLS if with_tools and _WITH_TOOLS in self.sources else _DEFAULT
        return self.sources[name]


def find(tokenizer: Tokenizer, chosen: str | None = None, where: str = "data.chat_template") -> Template:
    """Find the template of a tokenizer, read from a file, in the same places as transformers, unless a template file is `chosen`.

    Template files take precedence over templates in the tokenizer's settings. `chat_template.json`, which transformers reads only for
    multimodal models, comes last. Raise InputError if there is no template, or a file cannot be read or is too large.
    """
    folder = tokenizer.path.parent
    settings = _settings(folder / SETTINGS)
    variables = _special_tokens(settings, tokenizer)
    if chosen is not None:
        return Template({_DEFAULT: _read(located(chosen, where), where)}, variables, f"'{chosen}'")
    more = sorted(path for path in (folder / FOLDER).glob("*.jinja") if path.is_file())[:_MOST_TEMPLATES]
    files = {_DEFAULT: folder / FILE} if (folder / FILE).is_file() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in more}
    if files:
        place = f"'{folder / FOLDER}'" if more else f"'{folder / FILE}'"
        sources = {name: _read(path, "chat template") for name, path in files.items()}
        return Template(_with_default(sources, f"{place}: expected {FILE} beside it"), variables, place)
    for name in (SETTINGS, LEGACY):
        content = settings if name == SETTINGS else _settings(folder / name)
        if content.get("chat_template") is not None:
            place = f"'{folder / name}'"
            return Template(_named(content["chat_template"], place), variables, place)
    raise InputError(
        where=where,
        expected=f"a chat template next to '{tokenizer.path}' ({FILE}, or chat_template in {SETTINGS})",
        found="none",
        change="give the tokenizer of a chat model, or name a template in data.chat_template",
    )


def _read(path: Path, where: str) -> str:
    return read_text(
        path, MOST_BYTES, f"{where}: cannot read '{path}'", "give a chat template", f"{where}: expected text in '{path}', found no UTF-8"
    )


def _named(value: Any, place: str) -> dict[str, str]:
    """Return a dict from names to templates, from the value of `chat_template` in a tokenizer_config.json.

    Raise InputError if the value has another form, a template is too large, or there is none with the name `default`.
    """
    items = [{"name": _DEFAULT, "template": value}] if isinstance(value, str) else value if isinstance(value, list) else []
    pairs = [(item.get("name"), item.get("template")) for item in items[:_MOST_TEMPLATES] if isinstance(item, dict)]
    expected = f"{place}: chat_template: expected a template, or a list of objects with name and template, one with the name 'default'"
    named = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    sources = _with_default(named, expected, type(value).__name__)
    if (size := max(len(source.encode(errors="replace")) for source in sources.values())) > MOST_BYTES:
        raise InputError(f"{place}: chat_template: expected at most {MOST_BYTES:,} bytes, found {size:,}; is it a template?")
    return sources


def _with_default(sources: dict[str, str], expected: str, otherwise: str = "") -> dict[str, str]:
    """Return `sources` after checking that there is a template `default`, for conversations without tools.

    Raise InputError if there is not. Without any template, the message says that `otherwise` was found.
    """
    if _DEFAULT not in sources:
        found = short(sorted(sources)) if sources else otherwise
        raise InputError(f"{expected}, found {found}; name a template with data.chat_template")
    return sources


def _settings(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; it is empty if the file does not exist."""
    if not path.is_file():
        return {}
    with readable("chat template"):
        return json_object(path, _MOST_SETTINGS, "chat template", "copy it again")


def _special_tokens(settings: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Return a dict from names in templates, such as bos_token, to special tokens."""
    found = {}
    if len(tokenizer.begin) == 1:
        found["bos_token"] = tokenizer.rules.id_to_token(tokenizer.begin[0])
    if tokenizer.end is not None:
        found["eos_token"] = tokenizer.rules.id_to_token(tokenizer.end)
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
