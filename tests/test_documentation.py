"""The snippets of the README and of docs/, their output, and the examples in docstrings run."""

import contextlib
import dataclasses
import doctest
import functools
import importlib
import io
import json
import pathlib
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator

import jax
import pydantic
import pytest
import yaml

import jpipe
import jpipe_planner.machine.targets
from docs import api, commands, lengths, options
from jpipe.checkpoints.records import ProcessRecord
from jpipe_train.cli import main
from jpipe_train.config.config import Config
from jpipe_train.registry import find, names

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "papers" / "README.md"]
MODULES = sorted(module.name for module in pkgutil.walk_packages(jpipe.__path__, "jpipe."))


def blocks(language: str) -> list[str]:
    """Return the code blocks of the README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.oldest
def test_the_readmes_snippets_run_and_the_model_learns(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # JAX as a reader has it
        names = runpy.run_path(str(script))
    (loss,) = names["metrics"].losses.values()
    (told,) = re.findall(r"# about (0\.\d+)$", script.read_text(), re.MULTILINE)
    assert float(told) / 5 < float(loss) < 5 * float(told)  # other versions of JAX round otherwise
    assert isinstance(names["pipe"].model(names["state"]), names["Net"])


def test_a_users_model_is_trained_by_six_lines():
    _, six = blocks("python")[0].split("\n\nstack = ")
    assert "from_model(model, " in six
    assert len(six.splitlines()) == 6


@pytest.fixture
def registry() -> Iterator[None]:
    """Remove the schedules that a page registers."""
    before = {*jpipe.schedules.SCHEDULES}
    yield
    for name in {*jpipe.schedules.SCHEDULES} - before:
        del jpipe.schedules._BY_NAME[name]


LONG = "any-model.md", "does-not-fit.md", "which-schedule.md"  # those with whole trainings
TESTED_ELSEWHERE = "write-a-capability.md", "compare-runs.md"  # the first changes jpipe, the second needs Optuna
SNIPPET = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.exhaustive if page.name in LONG else pytest.mark.slow, id=page.name)
        for page in PAGES
        if page.name not in TESTED_ELSEWHERE
    ],
)
def test_snippets_of_a_page_print_what_it_shows(page, tmp_path, monkeypatch, registry):
    """All snippets of a page form one script; a text block right below a snippet is its output."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    lines, outputs = [""] * text.count("\n"), []
    for snippet in SNIPPET.finditer(text):
        first = text[: snippet.start(1)].count("\n")
        code = snippet[1].splitlines()
        lines[first : first + len(code) + 1] = [*code, "print(end='\\0')"]  # every line stays where it is on the page
        outputs.append(snippet[2] or "")
    script, printed = tmp_path / page.name, io.StringIO()
    script.write_text("\n".join(lines))
    with contextlib.redirect_stdout(printed), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(script))
    assert printed.getvalue().split("\0")[:-1] == outputs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_output_on_a_page_is_left_unchecked(page):
    outputs = [snippet[2] for snippet in SNIPPET.finditer(page.read_text()) if snippet[2]]
    assert page.read_text().count("```text\n") == len(outputs), "a text block stands alone: put it right below the snippet that prints it"


CONSOLE = re.compile(r"^```console\n\$ jpipe ([^\n]*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("command", "output"), [match for page in PAGES for match in CONSOLE.findall(page.read_text())])
def test_commands_that_a_page_shows_are_refused_like_that(command, output, tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "runs" / "0001").mkdir(parents=True)
    (tmp_path / "runs" / "0001" / "metrics.jsonl").touch()  # as a run before leaves it
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 2
    assert capsys.readouterr().err == output


COMMAND = re.compile(r"^    jpipe ((?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
COMMANDS = sorted({shown for page in (ROOT / "README.md", *PAGES) for shown in COMMAND.findall(page.read_text())})


@functools.cache
def help_of(*command: str) -> str:
    """Return the help of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit):
            main([*command, "--help"])
    return printed.getvalue()


@pytest.mark.parametrize("command_line", COMMANDS)
def test_commands_of_a_page_have_options_and_files_that_exist(command_line):
    words = shlex.split(command_line, comments=True)
    first = words[:2] if words[0] == "data" else words[:1]  # it has commands of its own
    launched = words[words.index("--") + 1 :][:1] if words[0] == "launch" else []
    known = help_of(*first) + (help_of(*launched) if launched else "")
    for word in words[1:]:
        assert not word.startswith("-") or word == "--" or re.search(rf"(^|[ ,]){re.escape(word.split('=')[0])}\b", known), word
        assert not re.match("(configs|examples)/", word) or (ROOT / word).exists(), word


@pytest.mark.parametrize(
    ("language", "snippet"), [m for page in PAGES for m in re.findall(r"^```(yaml|bash)\n(.*?)^```", page.read_text(), re.M | re.S)]
)
def test_yaml_and_shell_snippets_of_a_page_are_valid(language, snippet):
    if language == "yaml":
        assert all(isinstance(document, dict | list) for document in yaml.safe_load_all(snippet))
    else:
        assert subprocess.run(["bash", "-n"], input=snippet, text=True, capture_output=True, check=False).stderr == ""


def test_the_indexed_job_has_what_kubernetes_asks_for():
    text = (ROOT / "docs" / "how-to" / "clusters.md").read_text()
    service, job = yaml.safe_load_all(re.search(r"^```yaml\n(apiVersion.*?)^```", text, re.MULTILINE | re.DOTALL)[1])
    assert (service["spec"]["clusterIP"], job["spec"]["completionMode"]) == ("None", "Indexed")
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    environment = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(environment["JAX_NUM_PROCESSES"])
    assert environment["JAX_COORDINATOR_ADDRESS"].startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def test_only_contents_have_directives():
    """The web view of a repository shows no directives of MyST."""
    pages = [page for page in PAGES if re.search(r"^(```\{|:::)", page.read_text(), re.MULTILINE)]
    assert {page.name for page in pages} == {"index.md"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_to_other_sites_are_addresses(page):
    for link in re.findall(r"\]\((\w+:[^)]*)\)", page.read_text()):
        address = urllib.parse.urlsplit(link)
        assert address.scheme == "https", link
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", address.netloc), link
        assert not re.search(r"\s", link), link


def tables_of_keys() -> dict[str, dict[str, list[str]]]:
    """Return the tables of docs/reference/config/ as {section: {key: [meaning, default, limits]}}."""
    tables = {}
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "reference" / "config").glob("*.md"))]
    for part in (part for page in pages for part in page.split("\n## ")[1:]):
        title, _, body = part.partition("\n")
        rows = [[cell.strip() for cell in row] for row in re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", body, re.MULTILINE)]
        tables[title.strip("`")] = {key: cells for key, *cells in rows}
    return tables


def test_the_tables_of_keys_have_every_key_of_a_config_and_no_other():
    sections = {name: fields_of(name).keys() for name, field in Config.model_fields.items() if is_section(field)}
    top = {name for name, field in Config.model_fields.items() if not is_section(field)}
    documented = {title: set(rows) for title, rows in tables_of_keys().items() if rows}
    assert documented == {"Top level": top, **sections}


def fields_of(section: str) -> dict[str, type[pydantic.BaseModel]]:
    """Return the keys of a section, each with a class that has it: of all kinds of models and formats of data."""
    models, formats = ([find(group, name) for name in names(group)] for group in ("models", "formats"))
    classes = {"model": models, "data": formats, "tune": [model.tune_section for model in models]}
    return {key: cls for cls in classes.get(section, [Config.model_fields[section].annotation]) for key in cls.model_fields}


def is_section(field) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel)


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, rows in tables_of_keys().items() for key in rows])
def test_a_row_of_the_tables_of_keys_is_correct(section, key):
    meaning, default, limits = tables_of_keys()[section][key]
    model = Config if section == "Top level" else fields_of(section)[key]
    assert len(meaning.split()) >= 2
    assert yaml.safe_load(default.strip("`")) == model.model_fields[key].get_default()
    schema = model.model_json_schema()["properties"][key]
    for part in (schema, *schema.get("anyOf", ())):
        for bound, sign in (("minimum", "≥"), ("maximum", "≤"), ("exclusiveMinimum", ">"), ("exclusiveMaximum", "<")):
            assert bound not in part or re.search(rf"{sign} {part[bound]:.0f}\b", limits), f"{sign} {part.get(bound)}"
        assert set(part.get("enum", ())) <= set(re.findall(r"`(\w+)`", limits))


def test_the_tables_of_keys_list_all_schedules_and_policies():
    plan = tables_of_keys()["plan"]
    assert re.findall(r"`(\w+)`", plan["schedule"][2]) == list(jpipe.schedules.SCHEDULES)
    assert re.findall(r"`(\w+)`", plan["recompute"][2]) == list(jpipe.plan.RECOMPUTE)


def test_the_options_of_schedules_have_their_rows():
    page = ROOT / "docs" / "reference" / "config" / "plan.md"
    assert options.with_table(page.read_text()) == page.read_text(), "run python -m docs.options"


def test_the_page_of_the_schedules_has_all_with_their_options():
    text = (ROOT / "docs" / "reference" / "schedules.md").read_text()
    assert set(re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE)) == set(jpipe.schedules.SCHEDULES)
    rows = re.findall(r"^\| (`[^|]*) \|([^|]*)\|[^|]*\|[^|]*\|$", text.split("## Options")[1], re.MULTILINE)
    shown = {name: set(re.findall(r"`(\w+)`", options)) for names, options in rows for name in re.findall(r"`(\w+)`", names)}
    assert shown == {name: set(schedule.options) for name, schedule in jpipe.schedules.SCHEDULES.items()}


NAMES = [(module, name) for module in api.MODULES for name in api.public_names(module)]


def test_no_name_is_exported_twice():
    assert len({name for _, name in NAMES}) == len(NAMES)


def test_the_page_of_the_api_lists_all_modules():
    text = (ROOT / "docs" / "reference" / "api" / "index.md").read_text()
    assert re.findall(r"^- `([\w.]+)`: \w+", text, re.MULTILINE) == list(api.MODULES)
    assert re.search(r":hidden:\n\n(.*?)\n```", text, re.DOTALL)[1].split() == list(api.MODULES)


def test_the_page_of_the_command_line_has_all_commands():
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert re.findall(r"^## `(.+)`$", text, re.MULTILINE) == ["jpipe", *(f"jpipe {name}" for name in commands.names())]
    assert commands.with_help(text) == text, "run python -m docs.commands"
    assert len(re.findall(r"^usage: jpipe", text, re.MULTILINE)) == text.count("\n## ")
    assert "--allow-code" in text.split("## `jpipe train`")[1].split("\n## ")[0]


def examples_of_files() -> list[tuple[str, str, str]]:
    """Return the examples of docs/reference/files.md as (title of the section, language, text)."""
    sections = (ROOT / "docs" / "reference" / "files.md").read_text().split("\n## ")[1:]
    return [
        (section.partition("\n")[0], *example)
        for section in sections
        for example in re.findall(r"^```(json|yaml)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    ]


def test_the_examples_of_files_can_be_read(tmp_path):
    examples = examples_of_files()
    assert [title for title, *_ in examples] == ["metrics.jsonl", "Checkpoint", "Plan", "Plan", "Profile", "Topology", "Target"]
    row, part, plan, ordered, profile, topology, target = (text for *_, text in examples)
    assert len(row.splitlines()) == 1
    described = " ".join(re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "reference" / "files.md").read_text(), re.MULTILINE))
    assert all(f"`{name}`" in described for name in json.loads(row))
    assert ProcessRecord.model_validate_json(part).layers == ["embed", "head"]
    assert jpipe.Plan.from_json(plan).stages[0].replicas == 2
    assert jpipe.simulate(jpipe.lower(jpipe.Plan.from_json(ordered), 1)).seconds > 0
    assert jpipe_planner.Profile.from_json(profile).ids == ("embed", "head")
    assert jpipe_planner.Topology.from_yaml(topology).num_devices == 16
    (tmp_path / "target.yaml").write_text(target)
    assert jpipe_planner.machine.targets.find_target(str(tmp_path / "target.yaml")).memory == 80e9


def test_the_readme_and_all_pages_are_short_and_have_one_title():
    assert list(lengths.problems(ROOT)) == []


def test_a_long_page_and_one_with_two_titles_are_reported(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("word " * 900 + "\n" * 120)
    (tmp_path / "docs" / "good.md").write_text("# Title\n```python\n# a comment\n" + "word " * 3000 + "\n```\n" + "word " * 2498)
    assert list(lengths.problems(tmp_path)) == []
    (tmp_path / "README.md").write_text("word " * 901 + "\n" * 121)
    (tmp_path / "docs" / "good.md").unlink()
    (tmp_path / "docs" / "long.md").write_text("# Title\n" + "word " * 2499)
    (tmp_path / "docs" / "two.md").write_text("# One\n\n# Two\n")
    assert [line.partition(";")[0] for line in lengths.problems(tmp_path)] == [
        "README.md: 901 words, at most 900",
        "README.md: 121 lines, at most 120",
        "docs/long.md: 2,501 words outside code blocks, at most 2,500",
        "docs/two.md: expected one title (a line that begins with '# '), found 2",
    ]


def test_noun_chains_are_counted(tmp_path):
    (tmp_path / "jpipe").mkdir()
    (tmp_path / "README.md").write_text("")
    module = tmp_path / "jpipe" / "module.py"
    module.write_text("# That of those\n" * lengths.CHAINS)
    assert list(lengths.problems(tmp_path)) == []
    module.write_text(module.read_text() + "# the run whose rows\n")
    assert f"code and docs: {lengths.CHAINS + 1} of " in "".join(lengths.problems(tmp_path))


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_docstring_of_a_class_names_its_fields(module, name):
    value = getattr(importlib.import_module(module), name)
    described = value if isinstance(value, type) else type(value)
    if dataclasses.is_dataclass(described):
        fields = [field.name for field in dataclasses.fields(described)]
    else:
        fields = getattr(described, "model_fields", getattr(described, "_fields", ()))
    text = "\n".join(each.__doc__ or "" for each in described.__mro__ if each.__module__.startswith("jpipe"))  # a class may inherit fields
    for field in fields:
        assert re.search(rf"^ +{field}: |`{field}`", text, re.MULTILINE), field


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_a_page_of_the_root_names_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"^    (\S+[/.]\S*)  ", text, re.MULTILINE)) | set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_table_of_what_libraries_do_names_every_module_of_data():
    """A package is named as one, and all modules with it; those of `files` are named one by one."""
    folders = [ROOT / "train" / package / "data" for package in ("jpipe_train", "jpipe_lm")]
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Data and libraries\n")
    cells = re.findall(r"^\| (`.+?) \|", section.partition("\n## ")[0], re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]
    modules = {path.stem for folder in folders for path in [*folder.glob("*.py"), *(init.parent for init in folder.glob("*/__init__.py"))]}
    modules |= {f"files.{path.stem}" for folder in folders for path in (folder / "files").glob("*.py") if path.stem != "__init__"}
    assert sorted(named) == sorted(modules - {"__init__", "files"})


def test_the_table_of_what_libraries_do_for_checkpoints_names_modules():
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Checkpoints and libraries\n")
    cells = re.findall(r"^\| (`.+?) \|", section.partition("\n## ")[0], re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_pages_that_the_code_names_exist():
    """Messages, docstrings, comments and configs name pages by their paths."""
    folders = ("jpipe", "planner", "train", "configs", "examples", "benchmarks", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    files += [ROOT / "Makefile", ROOT / "CHANGELOG.md", ROOT / "pyproject.toml"]
    named = {(path, page) for path in files for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
    assert len(named) > 10
    assert sorted(f"{path.relative_to(ROOT)} names {page}" for path, page in named if not (ROOT / page).exists()) == []
