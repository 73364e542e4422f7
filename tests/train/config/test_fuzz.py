"""Randomly corrupted configs, plans and command lines are refused, or read as an independent reader reads them."""

import copy
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jpipe
import jpipe_train.plan.simulate
from jpipe_lm.config.model.presets import PRESETS
from jpipe_train import cli
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.config.functions import optax_names
from jpipe_train.config.functions.arguments import parameters_of
from jpipe_train.plan.simulate import Subject
from jpipe_train.report.summary import Summary
from jpipe_train.run import loop

ROOT = Path(__file__).parents[3]
CONFIGS = [path.read_text() for path in (*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "examples").glob("*.yaml")))]
CONFIGS.append("""
model: {target: "own:model", arguments: {rate: 1e-3, names: [a, b], sizes: {1: 2, 2: -.5}, say: "010"}}
optimizer: {name: own:rule, lr_schedule: cosine, arguments: {b: 0.5, flag: true, nothing: null}}
plan: {recompute: [none, full], num_stages: 2}
""")
PLANS = [
    jpipe.Plan.even("abcdef", 3, "pipedream_2bw", 4, recompute=["none", "full", "dots_saveable"]),
    jpipe.Plan.even("abc", 3, "pipedream", 2, vertical_sync=True, extra_in_flight=1),
    jpipe.Plan.even("ab", 2, "gpipe", 2, placement=[[0], [3]]),
    jpipe.Plan.even("abcd", 1, "naive", 1),
]
PLAN_TEXTS = [plan.to_json() for plan in PLANS]  # not in a strategy, where nothing else may draw random numbers: beartype does
PARTS_OF_PLANS = {"links": jpipe.plan.Links, "offload": jpipe.plan.HostMemory}  # empty ones are allowed
KEYS = [f"{section}.{key}" for section, keys in Config().model_dump().items() if section != "seed" for key in keys]
PATHS = ["seed", *KEYS, "model.arguments.rate", "optimizer.arguments.b"]


def number_of_examples(number: int) -> settings:
    """Return settings for this number of examples, the same ones in every run."""
    suppressed = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)
    return settings(max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=suppressed)


# What a file may hold -----------------------------------------------------------------------------------------------------

NUMBERS = [0, 1, -1, 2, 3, 3.0, 0.5, 64, 1024, 2**31, 2**32, 2**63, 2**64, -(10**30), 10**400, 5e-324, 1e300, float("nan"), float("inf")]
TEXTS = [
    "",
    " ",
    "3",
    "1e-3",
    "true",
    "null",
    "gpipe",
    "full",
    'it\'s "so"',
    "a\nb",
    "\x1b[31m",
    "é → \u202e",
    "~nobody/x",
    "~\ud800",
    "\0",
]
SPELLINGS = """
    ~ null true True FALSE yes No off 0 -0 +1 3. .5 -.5 1e3 1E+3 1e-3 1_000 1_0e-2 0x10 0b11 0o17 010 08 1:30 1:30.5 2001-01-01 2001-99-99
    .nan .inf -.Inf 1e400 1e-400 18446744073709551616 << = & *x &x !!int ! | > ? - : , { [ ] } {} [] [none] # % @ ` ' " '' 'a "a --- ... \\
    none full gpipe adam sgd a:b cosine 1 2 4 8 0.1
"""
WORDS = [*SPELLINGS.split(), "{a: }", "[none, full]"]
VALUES = st.recursive(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "layers", "", 1, True, None]), inner, max_size=2),
    max_leaves=4,
)
SNIPPETS = st.sampled_from(
    [*WORDS, "\t", "\n", "  ", "\r\n", "\x00", "\ufeff", "\u00a0", "\u2028", "\x85", "ѕ", "\n---\n", "\n...\n", '"', ","]
) | st.text(max_size=3)


def paths(data: Any, above: tuple = ()) -> list[tuple]:
    """Return the paths of all items inside nested data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in ((*above, key), *paths(value, (*above, key)))]


@st.composite
def respelled(draw, key: Any) -> Any:
    """Draw a misspelling of a key, or another value in its place."""
    text, at = str(key), draw(st.integers(0, len(str(key))))
    ways = [
        text[:at] + text[at + 1 :],
        text[:at] + "x" + text[at:],
        text.upper(),
        f"{text} ",
        f" {text}",
        text.replace("e", "е"),
        f"x.{text}",
    ]
    return draw(st.sampled_from([*ways, 1, None, True, "", "stages", "plan", "train", "steps", "format", "self"]))


@st.composite
def spoiled_data(draw, data: Any) -> Any:
    """Draw plain data with a value or key dropped, renamed, replaced, retyped, swapped or doubled in up to three places."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        if not (inside := paths(data)):
            return data
        *above, last = draw(st.sampled_from(inside))
        holder = data
        for key in above:
            holder = holder[key]
        value = holder[last]
        match draw(st.sampled_from(["drop", "rename", "replace", "replace", "replace", "retype", "retype", "swap", "double"])):
            case "drop":
                del holder[last]
            case "rename" if isinstance(holder, dict):
                holder[draw(respelled(last))] = holder.pop(last)
            case "replace":
                holder[last] = draw(VALUES)
            case "retype":
                holder[last] = draw(
                    st.sampled_from([[value], {last: value}, str(value), bool(value), 1.0 * value if type(value) is int else None])
                )
            case "swap":
                other = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
                holder[last], holder[other] = holder[other], holder[last]
            case _:
                if isinstance(value, list):
                    holder[last] = value + value
                elif isinstance(holder, dict):
                    holder[draw(respelled(last))] = value
    return data


@st.composite
def spoiled_text(draw, text: str) -> str:
    """Draw text that is cut off, or has characters, lines, values, tabs or marks added or removed in up to three places."""
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        a, b = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        b = min(b, a + 20)
        lines = text.split("\n")
        i, j = draw(st.tuples(*[st.integers(0, len(lines) - 1)] * 2))
        match draw(
            st.sampled_from(["cut", "delete", "insert", "value", "value", "value", "repeat", "repeat", "move", "indent", "mark", "crlf"])
        ):
            case "cut":
                text = text[:a]
            case "delete":
                text = text[:a] + text[b:]
            case "insert":
                text = text[:a] + draw(SNIPPETS) + text[a:]
            case "value":
                lines[i] = re.sub(r"(: *)[^,}#]*", lambda match: match[1] + draw(SNIPPETS), lines[i], count=1)
                text = "\n".join(lines)
            case "repeat":
                at = draw(st.sampled_from([i, j, j]))
                text = "\n".join([*lines[:at], lines[j], *lines[at:]])
            case "move":
                lines[i], lines[j] = lines[j], lines[i]
                text = "\n".join(lines)
            case "indent":
                lines[i] = draw(st.sampled_from([" ", "  ", "\t", "      "])) + lines[i].lstrip(draw(st.sampled_from(["", " "])))
                text = "\n".join(lines)
            case "mark":
                text = "\ufeff" + text
            case _:
                text = text.replace("\n", draw(st.sampled_from(["\r\n", "\r", "\n\n"])))
    return text


def encoded(text: str, encoding: str) -> bytes:
    return text.encode(encoding, errors="replace" if encoding == "latin-1" else "surrogatepass")


WAYS = st.sampled_from([("data",), ("text",), ("data", "text")])
ENCODINGS = st.sampled_from(["utf-8"] * 30 + ["latin-1", "utf-16", "utf-8-sig"])


@st.composite
def config_files(draw) -> bytes:
    text, ways = draw(st.sampled_from(CONFIGS)), draw(WAYS)
    if "data" in ways:
        text = yaml.safe_dump(draw(spoiled_data(yaml.safe_load(text))), allow_unicode=draw(st.booleans()), sort_keys=False)
    if "text" in ways:
        text = draw(spoiled_text(text))
    return encoded(text, draw(ENCODINGS))


@st.composite
def plan_files(draw) -> bytes:
    text, ways = draw(st.sampled_from(PLAN_TEXTS)), draw(WAYS)
    if "data" in ways:
        text = json.dumps(draw(spoiled_data(json.loads(text))), indent=draw(st.sampled_from([None, 1])), ensure_ascii=draw(st.booleans()))
    if "text" in ways:
        text = draw(spoiled_text(text))
    return encoded(text, draw(ENCODINGS))


@st.composite
def override_words(draw) -> str:
    path = draw(st.sampled_from(PATHS))
    if draw(st.integers(0, 3)) == 0:
        path = ".".join(str(part) for part in draw(st.permutations([*path.split("."), draw(respelled(path))]))[: draw(st.integers(1, 3))])
    value = draw(st.sampled_from(WORDS) | SNIPPETS | VALUES.map(json.dumps))
    return draw(st.sampled_from([f"{path}={value}"] * 9 + [f"{path}{value}"]))


@st.composite
def command_lines(draw) -> list[str]:
    """Draw no, one or two overrides; two may be of the same key."""
    words = draw(st.lists(override_words(), max_size=2))
    return words if len(words) < 2 or draw(st.booleans()) else [words[0], words[0]]


# What it means ------------------------------------------------------------------------------------------------------------


class Ambiguous(Exception):
    """An error for YAML that readers interpret differently."""


def plain(node: yaml.Node | None) -> Any:
    """Convert a YAML node to data by rules written independently of jpipe: keys are unique, and a word is what it looks like."""
    match node:
        case None:
            return None
        case yaml.MappingNode():
            return unique([(plain(key), plain(value)) for key, value in node.value])
        case yaml.SequenceNode():
            return [plain(item) for item in node.value]
    word = node.value
    if node.style is not None:
        return word
    if word in ("", "~", "null", "Null", "NULL"):
        return None
    if word.lower() in ("true", "false") and word in (word.lower(), word.upper(), word.title()):
        return word.lower() == "true"
    number = word.replace("_", "")
    if re.fullmatch(r"[-+]?(0|[1-9]\d*|0x[\da-fA-F]+|0b[01]+)", number):
        return int(number, 0)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", number) and not re.fullmatch(r"[-+]?\d+", number):
        if math.isinf(float(number)):
            raise Ambiguous(word)
        return float(number)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", word):
        return float(word.replace(".", ""))
    if node.tag != "tag:yaml.org,2002:str" or re.fullmatch(r"[-+]?(0[xbo])?\d+", number):
        raise Ambiguous(word)
    return word


def unique(pairs: list[tuple]) -> dict:
    """Return a dict of these pairs, checking that no key occurs twice."""
    if any(key == other for i, (key, _) in enumerate(pairs) for other, _ in pairs[:i]):
        raise Ambiguous("a key occurs twice")
    return dict(pairs)


def refuse(constant: str) -> Any:
    raise Ambiguous(constant)


def same(actual: Any, meant: Any) -> bool:
    """Return whether data are equal and of the same type; only a whole number may stand for a float."""
    match actual, meant:
        case (dict(), dict()):
            return actual.keys() == meant.keys() and all(same(actual[key], meant[key]) for key in actual)
        case (list(), list()):
            return len(actual) == len(meant) and all(map(same, actual, meant))
        case (float(), int() | float()) if not isinstance(meant, bool):
            return actual == meant or actual != actual != meant != meant
    return type(actual) is type(meant) and actual == meant


def filled(section: dict, fields: dict, empty: tuple[str, ...] = ()) -> dict:
    """Add the defaults of missing fields, checking that there are no other keys; null may stand for {} in `empty`."""
    assert section.keys() <= fields.keys()
    usual = {key: dict(field.default) if isinstance(field.default, Mapping) else field.default for key, field in fields.items()}
    return {key: {} if key in empty and section.get(key, 0) is None else section.get(key, usual[key]) for key in fields}


def assert_means(config: Config, content: bytes, overrides: list[str]) -> None:
    """Check that the config has the values of this text and these overrides, and defaults for everything else."""
    data = plain(yaml.compose(content.decode("utf-8").removeprefix("\ufeff"), yaml.SafeLoader)) or {}
    for i, override in enumerate(overrides):
        path, _, value = override.partition("=")
        assert not any(other.startswith((f"{path}=", f"{path}.")) for other in overrides[:i])
        *sections, last = path.split(".")
        holder = data
        for section in sections:
            holder[section] = holder.get(section) or {}
            holder = holder[section]
        holder[last] = plain(yaml.compose(value, yaml.SafeLoader))
    scalars = ("seed", "compile_cache", "log")
    sections = filled(data, Config.model_fields, empty=tuple(Config.model_fields.keys() - set(scalars)))
    for scalar in scalars:
        assert same(getattr(config, scalar), sections.pop(scalar))
    for name, section in sections.items():
        parsed = getattr(config, name)
        if name == "model" and isinstance(section, dict) and section.get("preset"):
            section = {**PRESETS[section["preset"]], **section}
        meant = filled(section, type(parsed).model_fields, ("arguments", "lr_arguments")) if isinstance(section, dict) else dict(section)
        assert same(dict(parsed), meant)


@pytest.fixture
def answered(capsys, monkeypatch, tmp_path):
    """Run `jpipe`; it must end with 0 in silence, or with 2 and one message in printable lines. Gives whether it was 0."""
    monkeypatch.chdir(tmp_path)
    jax.devices()  # as many as the tests have, before a command asks for more

    def answered(*arguments: str) -> bool:
        capsys.readouterr()
        try:
            code = cli.main(arguments)
        except SystemExit as stopped:  # of the option parser
            code = stopped.code
            capsys.readouterr()
            print("jpipe: it told", file=sys.stderr)
        printed = capsys.readouterr()
        if code == 0:
            assert printed.err == ""
            return True
        assert code == 2
        assert printed.out == ""
        assert printed.err.startswith("jpipe: ")
        lines = printed.err.removesuffix("\n").split("\n")
        assert [line.startswith("jpipe: ") for line in lines] == [True] + [False] * (len(lines) - 1)
        assert all(line and line.isprintable() for line in lines)
        return False

    return answered


@pytest.fixture
def accepted(monkeypatch) -> list[Config]:
    """Return a list that collects the configs for which a model would be built; none is built."""
    configs = []
    ended = Summary(steps=0, val_loss_before=0.0, val_loss_after=0.0, seconds=0.0, folder=None, predicted=None, measured=None)
    monkeypatch.setattr(loop, "main", lambda config, *_: (configs.append(config), ended)[1])
    monkeypatch.setattr(
        jpipe_train.plan.simulate, "plan_and_costs", lambda config, compile, device: (configs.append(config), Subject(PLANS[-1]))[1]
    )
    return configs


any_config = given(
    content=config_files() | st.sampled_from(CONFIGS).map(str.encode),
    overrides=command_lines(),
    command=st.sampled_from(["train", "simulate"]),
)


def check_config(answered, accepted, tmp_path, content, overrides, command):
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    accepted.clear()
    flags = [word for override in overrides for word in ("--set", override)]
    is_accepted = answered(command, str(file), "--allow-code", *flags)
    assert len(accepted) == is_accepted
    for config in accepted:
        assert_means(config, content, overrides)
        file.write_text(config_file.to_yaml(config), encoding="utf-8")
        plan = config.plan if config.plan.file is None else type(config.plan)(file=config.plan.file)  # it replaces the other keys
        assert same(config_file.load(file, allow_code=True).model_dump(), config.model_copy(update={"plan": plan}).model_dump())


@pytest.mark.exhaustive
@number_of_examples(150)
@any_config
def test_a_corrupted_config_is_refused_or_read_exactly(answered, accepted, tmp_path, content, overrides, command):
    check_config(answered, accepted, tmp_path, content, overrides, command)


@pytest.mark.exhaustive
@number_of_examples(700)
@any_config
def test_many_corrupted_configs_are_refused_or_read_exactly(answered, accepted, tmp_path, content, overrides, command):
    check_config(answered, accepted, tmp_path, content, overrides, command)


def check_plan(answered, monkeypatch, tmp_path, content):
    plans, real = [], jpipe.lower
    with monkeypatch.context() as patch:
        patch.setattr(jpipe_train.plan.simulate, "MOST_FORWARDS", 200)
        patch.setattr(jpipe, "lower", lambda plan, batches, **options: (plans.append(plan), real(plan, batches, **options))[1])
        (tmp_path / "plan.json").write_bytes(content)
        is_accepted = answered("simulate", "plan.json")
    assert bool(plans) == is_accepted
    for plan in plans:
        data = json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
        parts = {name: filled(data[name], model.model_fields) for name, model in PARTS_OF_PLANS.items() if data.get(name) is not None}
        stages = [filled(stage, jpipe.Stage.model_fields) for stage in data["stages"]]
        meant = filled(data | parts | {"stages": stages}, jpipe.Plan.model_fields)
        assert same(plan.model_dump(mode="json"), json.loads(json.dumps(meant)))  # a default may be a tuple


@pytest.mark.parametrize("left_out", ["stages", *PARTS_OF_PLANS])
def test_what_a_plan_leaves_out_has_its_default(answered, monkeypatch, tmp_path, left_out):
    """Stages have their layers alone, or the other parts are there and empty."""
    data = json.loads(PLAN_TEXTS[0])
    data[left_out] = [{"layers": stage["layers"]} for stage in data["stages"]] if left_out == "stages" else {}
    check_plan(answered, monkeypatch, tmp_path, json.dumps(data).encode())


@pytest.mark.slow
@number_of_examples(75)
@given(content=plan_files())
def test_a_corrupted_plan_is_refused_or_read_exactly(answered, monkeypatch, tmp_path, content):
    check_plan(answered, monkeypatch, tmp_path, content)


@pytest.mark.exhaustive
@number_of_examples(700)
@given(content=plan_files())
def test_many_corrupted_plans_are_refused_or_read_exactly(answered, monkeypatch, tmp_path, content):
    check_plan(answered, monkeypatch, tmp_path, content)


def argument(name: str, key: str, functions: dict) -> st.SearchStrategy[list[str]]:
    """Return a strategy for overrides that name one of these functions and set one of its arguments."""
    words = [(function, parameter) for function, value in functions.items() for parameter in parameters_of(value)]
    value = VALUES.map(json.dumps) | st.sampled_from(WORDS)
    return st.builds(
        lambda pair, value: [f"optimizer.{name}={pair[0]}", f"optimizer.{key}.{pair[1]}={value}"], st.sampled_from(words), value
    )


@pytest.mark.slow
@number_of_examples(60)
@given(
    overrides=argument("name", "arguments", optax_names.optimizers())
    | argument("lr_schedule", "lr_arguments", optax_names.schedules())
    | override_words().map(lambda word: [word])
)
def test_a_corrupted_value_is_refused_no_later_than_when_the_run_is_built(answered, tmp_path, tiny, overrides):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    answered("simulate", "tiny.yaml", *(word for override in overrides for word in ("--set", override)))
