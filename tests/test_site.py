"""The documentation site is built without a warning, needs no network, and describes every public name."""

import html
import inspect
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import jax
import optax
import pydantic
import pytest

import jpipe
from docs import annotations, api, extension
from jpipe.errors import InputError
from tests.packages import ROOT
from tests.train import browser


@pytest.fixture
def site(tmp_path):
    """Return the folder of the site: that which `make check-docs` has built, or else one that is built here, which takes a minute."""
    if built := os.environ.get("JPIPE_SITE"):
        return Path(built)
    words = ["--fail-on-warning", "--keep-going", "-q", "-t", "fast", "-d", tmp_path / "trees", ROOT / "docs", tmp_path / "site"]
    result = subprocess.run([sys.executable, "-m", "sphinx", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.returncode == 0
    return tmp_path / "site"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_site_is_complete_and_needs_no_network(site):
    """Not in `make test-slow`, because `make check-docs` has it."""
    names = (path for path in site.rglob("*.html") if "_modules" not in path.parts)
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in names}
    remote = r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"'
    assert {name: links for name, page in pages.items() if (links := re.findall(remote, page))} == {}
    for path in (ROOT / "docs").rglob("*.md"):
        assert path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in pages
    for module in api.MODULES:
        described = descriptions(pages[f"reference/api/{module}.html"])
        for name in api.public_names(module):
            signature, text = described[f"{module}.{name}"]
            assert len(text.split()) >= 4, f"{module}.{name} has no description"
            assert not re.search(r"jaxlib|typing\b|Annotated|jpipe\.\w+\._| at 0x", signature), f"{module}.{name}: {signature}"
    assert '<meta name="description" content="jpipe trains JAX and Flax models that do not fit one accelerator' in pages["index.html"]
    assert "Show one device with the sources of its properties" in pages["reference/cli.html"]
    assert "semantic versioning" in pages["reference/changelog.html"]


def test_the_sidebar_has_the_groups_of_the_index_pages():
    for folder in ("how-to", "explanation"):
        index = (ROOT / "docs" / folder / "index.md").read_text()
        groups = extension.groups(index)
        assert [*groups.values()] == re.findall(r"^## (.+)", index, re.MULTILINE)
        listed = re.findall(r"^- \[[^\]]*\]\(([\w/-]+)\.md\)", index, re.MULTILINE)
        assert re.search(r":hidden:\n\n([^`]*)```", index)[1].split() == listed, "the pages of a group follow each other"
    items = "".join(f'<li class="toctree-l2"><a href="{href}">x</a></li>' for href in ("#", "train.html", "any-model.html", "plan.html"))
    context = {"generate_toctree_html": lambda kind, depth: f"<ul>{items}</ul>" if (kind, depth) == ("sidebar", 1) else None}
    relative = types.SimpleNamespace(get_relative_uri=lambda page, other: other.removeprefix("how-to/") + ".html")
    app = types.SimpleNamespace(srcdir=str(ROOT / "docs"), builder=relative)
    extension._group_sidebar(app, "how-to/install", "page.html", context, None)
    found = re.findall(
        r'<li class="group">([^<]*)</li><li class="toctree-l2"><a href="([^"]*)"', context["generate_toctree_html"]("sidebar", depth=1)
    )
    assert found == [("Your model", "any-model.html"), ("A plan for your machines", "plan.html")]


def test_a_search_has_pages_first_whose_titles_have_all_its_words(tmp_path):
    results = [
        ["explanation/checkpoints", "How checkpoints work", "", None, 15],
        ["how-to/fit", "Train from Python > Resume", "#resume", None, 15],
        ["how-to/compare-runs", "Compare runs", "", None, 15],
        ["how-to/checkpoints", "Stop and resume a run", "", None, 5],
    ]
    program = f"""<body><script>class Stemmer {{ stemWord(word) {{ return word.replace(/s$/, ""); }} }}</script>
        <script>{(ROOT / "docs" / "static" / "scorer.js").read_text()}</script><script>
        const first = (query) => {json.dumps(results)}.map((result) => [rank(query, result), result[0]]).sort((a, b) => b[0] - a[0])[0];
        document.body.textContent = ["resume", "Resume runs", "run", "nothing"].map((query) => first(query).join(" ")).join(", ");
        </script></body>"""
    (tmp_path / "page.html").write_text(program)
    shown = browser.run(tmp_path / "page.html", "--dump-dom")
    assert "100 how-to/checkpoints, 100 how-to/checkpoints, 113 how-to/compare-runs, 15 explanation/checkpoints" in shown


def descriptions(page: str) -> dict[str, tuple[str, str]]:
    """Return signature and text of each object on a page, by its full name."""
    parts = re.split(r'<dt class="sig[^"]*" id="([\w.]+)">', page)[1:]
    texts = {}
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        signature, _, text = html.unescape(part).partition("</dt>")
        texts[name] = (re.sub(r"<[^>]*>", "", signature), re.sub(r"<[^>]*>", "", text))
    return texts


class Field(pydantic.BaseModel):
    size: Annotated[int, pydantic.Field(ge=1)] = 1


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Mapping[str, Path] | None, "Mapping[str, Path] | None"),
        (Annotated[tuple[int, ...], pydantic.Strict()], "tuple[int, ...]"),
        (Literal["newest", "ema"], "Literal['newest', 'ema']"),
        (Callable[[jax.Array], jpipe.Plan], "Callable[[jax.Array], Plan]"),
        (jax.Device, "jax.Device"),
        (jax.sharding.Sharding, "jax.sharding.Sharding"),
        (jax.typing.ArrayLike | None, "ArrayLike | None"),
        (optax.ScalarOrSchedule, "optax.ScalarOrSchedule"),
        (type[pydantic.BaseModel], "type[BaseModel]"),
        (inspect.Signature.empty, ""),
    ],
)
def test_a_type_is_written_as_a_person_would(annotation, expected):
    assert annotations.text(annotation) == expected


def test_a_signature_is_written_as_a_person_would():
    assert annotations.signature(Field) == ("(*, size: int = 1)", "")
    assert annotations.signature(jpipe.Plan.to_json) == ("()", "str")
    assert annotations.signature(InputError.__init__)[0].startswith("(")


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("jpipe", "Plan.microbatches", "int"),
        ("jpipe", "Plan.rules", "Mapping[str, str | None]"),
        ("jpipe", "Stage.shape", "Mapping[str, int]"),
        ("jpipe.ops", "OPS", "dict[str, Op]"),
    ],
)
def test_the_type_of_a_variable_is_found(module, name, expected):
    assert annotations.of_variable(module, name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jpipe.Plan", "jpipe.Plan"),
        ("Plan.even", "jpipe.Plan.even"),
        ("StageCost", "jpipe.programs.StageCost"),
        ("jpipe.schedules", "jpipe.schedules"),
        ("jpipe.schedules.SCHEDULES", "jpipe.schedules.SCHEDULES"),
        ("jpipe.schedules.nothing", None),
        ("jax.Array", None),
    ],
)
def test_a_public_name_has_its_place_in_the_reference(name, expected):
    assert extension.full_name(name) == expected


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](../../configs/gpt-bytes.yaml)", "[a](path:../../configs/gpt-bytes.yaml)"),
        ("[a](../../examples/papers/)", "[a](path:../../examples/papers/README.md)"),
        ("[a](../../configs/topologies)", "a"),
        ("[a](../../README.md#install)", "[a](../index.md)"),
        ("[a](../../CHANGELOG.md)", "[a](../reference/changelog.md)"),
        ("[a](../explanation/planner.md#topologies)", "[a](../explanation/planner.md#topologies)"),
        ("![a](../pictures/a.svg)", "![a](../pictures/a.svg)"),
    ],
)
def test_a_link_to_a_file_of_the_repository_leads_to_a_copy(link, expected):
    assert extension.direct_links(link, ROOT / "docs" / "how-to", ROOT / "docs") == expected
