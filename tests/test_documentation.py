"""The snippets of the README and of docs/, their output, and the examples in docstrings run."""

import contextlib
import dataclasses
import doctest
import html
import importlib
import io
import pathlib
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import jax
import pydantic
import pytest
import yaml

import jpipe
from docs import reference
from jpipe_train.cli import main
from jpipe_train.config.config import Config

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "papers" / "README.md"]
MODULES = sorted(module.name for module in pkgutil.walk_packages(jpipe.__path__, "jpipe."))


def blocks(language: str) -> list[str]:
    """Return the code blocks of the README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.oldest
def test_the_readmes_snippets_run_and_the_model_learns(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # JAX as a reader has it
        names = runpy.run_path(str(script))
    (loss,) = names["metrics"].losses.values()
    assert float(loss) < 0.1
    assert f"`{names['stack'].ids}`" in (ROOT / "README.md").read_text()
    assert isinstance(names["pipe"].model(names["state"]), names["Net"])
    assert names["prediction"].grid() == blocks("text")[0].rstrip("\n")


def test_a_users_model_is_trained_by_six_lines():
    _, six = blocks("python")[0].split("\n\nstack = ")
    assert "from_model(model, " in six
    assert len(six.splitlines()) == 6


SNIPPET = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_of_a_page_print_what_it_shows(page, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("command_line", COMMANDS)
def test_commands_of_a_page_have_options_and_files_that_exist(command_line, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = shlex.split(command_line, comments=True)
    known = ""
    first = words[:2] if words[0] == "data" else words[:1]  # it has commands of its own
    for command in (first, ["train"]) if words[0] == "launch" else (first,):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        known += capsys.readouterr().out
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
    text = (ROOT / "docs" / "how-to" / "multi-process.md").read_text()
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


def tables_of_keys() -> dict[str, dict[str, list[str]]]:
    """Return the tables of docs/reference/configuration.md as {section: {key: [meaning, default, limits]}}."""
    tables = {}
    for part in (ROOT / "docs" / "reference" / "configuration.md").read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        rows = [[cell.strip() for cell in row] for row in re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", body, re.MULTILINE)]
        tables[title.strip("`")] = {key: cells for key, *cells in rows}
    return tables


def test_the_tables_of_keys_have_every_key_of_a_config_and_no_other():
    sections = {name: set(field.annotation.model_fields) for name, field in Config.model_fields.items() if is_section(field)}
    top = {name for name, field in Config.model_fields.items() if not is_section(field)}
    documented = {title: set(rows) for title, rows in tables_of_keys().items() if rows}
    assert documented == {"Top level": top, **sections}


def is_section(field) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel)


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, rows in tables_of_keys().items() for key in rows])
def test_a_row_of_the_tables_of_keys_is_correct(section, key):
    meaning, default, limits = tables_of_keys()[section][key]
    model = Config if section == "Top level" else Config.model_fields[section].annotation
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


NAMES = [(module, name) for module in reference.MODULES for name in reference.public_names(module)]


def test_no_name_is_exported_twice():
    assert len({name for _, name in NAMES}) == len(NAMES)


def test_the_list_of_public_names_is_complete_and_names_the_right_files():
    sections = re.split(r"^## `([\w.]+)`$", (ROOT / "docs" / "reference" / "api.md").read_text(), flags=re.MULTILINE)[1:]
    listed = []
    for module, text in zip(sections[::2], sections[1::2], strict=True):
        for name, path in re.findall(r"^- \[`(\w+)`\]\(\.\./\.\./(.+?)\): \S", text, re.MULTILINE):
            listed.append((module, name))
            assert re.search(rf"^(class |def |){name}\b.*[:=(]", (ROOT / path).read_text(), re.MULTILINE), f"{name} is not in {path}"
    assert sorted(listed) == sorted(NAMES)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """Build the API reference without warnings and return its pages by module."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-W", "error", "-m", "docs.reference", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return {module: folder.joinpath(*module.split(".")).with_suffix(".html").read_text() for module in reference.MODULES}


def test_the_reference_has_every_public_name_in_order(pages):
    assert [(module, name) for module in pages for name in re.findall(r'<section id="(\w+)">', pages[module])] == NAMES


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_reference_describes_every_public_name(pages, module, name):
    section = pages[module].split(f'<section id="{name}">')[1].split("</section>")[0]
    docstring = section.split('<div class="docstring">')[1].split("</div>")[0]
    assert len(html.unescape(re.sub(r"<[^>]*>", "", docstring)).split()) >= 4
    types = "".join(re.findall(r'class="(?:signature|annotation)[^>]*>(.*?)</(?:div|label)>', section, re.DOTALL))
    assert not re.search(r"jaxlib|typing\b|jpipe\.\w+\._", re.sub(r"<[^>]*>", "", types)), "a type as nobody would write it"


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_docstring_of_a_class_names_its_fields(module, name):
    described = getattr(importlib.import_module(module), name)
    if dataclasses.is_dataclass(described) and isinstance(described, type):
        fields = [field.name for field in dataclasses.fields(described)]
    else:
        fields = getattr(described, "model_fields", getattr(described, "_fields", ()))
    for field in fields:
        assert re.search(rf"^ +{field}: |`{field}`", described.__doc__, re.MULTILINE), field


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_a_page_of_the_root_names_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"^    (\S+[/.]\S*)  ", text, re.MULTILINE)) | set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    assert len(named) > 1
    assert not [name for name in named if not (ROOT / name).exists()]
