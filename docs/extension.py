"""Extend Sphinx for this site: generated pages, names that link to the reference, links to files of the repository."""

import html
import importlib
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

from docs import annotations, api

ROOT = Path(__file__).parents[1]
FOREIGN_NAMES = [("py:.*", r"(?!jpipe).*"), ("py:class", r"jpipe_train\.(config|data)\.\w+\.\w+")]
"""Names without a page here: of Python, JAX and other libraries, and the types of a config and its data that sections get."""
_LINK_OUT = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<path>(?:\.\./)+[^)#\s]*)(?:#[^)\s]*)?\)")  # relative, above the page's folder
_LINE = 76  # characters of code that fit beside the contents of a page in a window of 1,280 pixels
_GOOGLE = Config(napoleon_use_rtype=False, napoleon_attr_annotations=False)
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "reference/changelog.md"}  # files of the repository that the site has as pages


def setup(app: Sphinx) -> Mapping[str, Any]:
    """Register everything of this module."""
    app.add_role("name", _name)
    app.connect("builder-inited", lambda app: api.write_pages(Path(app.srcdir) / "reference" / "api"))
    app.connect("source-read", _source_read)
    app.connect("autodoc-process-signature", _process_signature)
    app.connect("autodoc-process-docstring", _process_docstring)
    app.connect("autodoc-skip-member", _skip_member)
    app.connect("doctree-read", _add_types, priority=400)  # before the links to the source, which stand last
    app.connect("doctree-read", _link_names)
    app.connect("doctree-read", _widen)
    app.connect("missing-reference", _missing_reference)
    app.connect("html-page-context", _describe)
    app.connect("html-page-context", _group_sidebar, priority=900)  # after the theme, which makes the sidebar
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _name(role: str, rawtext: str, text: str, *_: Any) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Show text between backticks as code, which links to the reference if it is a public name."""
    literal = nodes.literal(rawtext, nodes.unescape(text), classes=["xref", "py"])
    return [_reference(literal.astext(), literal)], []


def full_name(name: str) -> str | None:
    """Return the full name of a public object or of a member of one, or None: `Plan.even` is `jpipe.Plan.even`."""
    if name in api.MODULES:
        return name
    head, _, member = name.partition(".")
    for module in api.MODULES:
        if name.startswith(f"{module}."):
            head, _, member = name.removeprefix(f"{module}.").partition(".")
            if head in api.public_names(module):
                return name
    full = api.qualified_names().get(head)
    return _member(full, member) if full and member else full


def _member(full: str, member: str) -> str:
    """Return the full name of a member at the class that describes it: `jpipe.Plan.agree` is `jpipe.plan.CapabilityOptions.agree`."""
    module, _, name = full.rpartition(".")
    described = getattr(importlib.import_module(module), name)
    if isinstance(described, type) and not re.search(rf"^ +{member}: ", described.__doc__ or "", re.MULTILINE):
        for base in described.__mro__[1:]:
            if base.__name__ in api.qualified_names() and re.search(rf"^ +{member}: ", base.__doc__ or "", re.MULTILINE):
                return f"{api.qualified_names()[base.__name__]}.{member}"
    return f"{full}.{member}"


def _source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Fill in what a page shows of the program, and direct links to files and folders of the repository."""
    folder = (Path(app.srcdir) / docname).parent
    if docname == "reference/changelog":
        content[0] = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](../")
    content[0] = direct_links(content[0], folder, Path(app.srcdir))


def direct_links(text: str, folder: Path, docs: Path) -> str:
    """Return the text of a page in `folder`, with links that leave `docs` directed to what the site has in their place."""
    return _LINK_OUT.sub(lambda link: _directed(link, folder, docs), text)


def _directed(link: re.Match[str], folder: Path, docs: Path) -> str:
    """Return a link to a page of the site, or to a file that is copied into it; a folder without a README is named only."""
    path = (folder / link["path"]).resolve()
    if path.is_relative_to(docs) or not path.is_relative_to(ROOT):
        return link[0]
    if (name := path.relative_to(ROOT).as_posix()) in _PAGES:
        return f"[{link['text']}]({'../' * len(folder.relative_to(docs).parts)}{_PAGES[name]})"
    if path.is_dir():
        return f"[{link['text']}](path:{link['path'].rstrip('/')}/README.md)" if (path / "README.md").is_file() else link["text"]
    return f"[{link['text']}](path:{link['path']})"


def _describe(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Add the first paragraph of a page to its head, as the description that search engines show."""
    paragraph = next(doctree.findall(nodes.paragraph), None) if doctree else None
    if paragraph is not None:
        text = textwrap.shorten(paragraph.astext(), 200, placeholder=" …")
        context["metatags"] += f'<meta name="description" content="{html.escape(text)}">\n'


def groups(index: str) -> dict[str, str]:
    """Return the headings of an index page by the first page that is listed below each, relative to its folder and without `.md`."""
    found = re.findall(r"^## (.+)\n\n?- \[[^\]]*\]\(([\w/-]+)\.md\)", index, re.MULTILINE)
    return {page: heading for heading, page in found}


def _group_sidebar(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Give the sidebar the groups of the index pages: Sphinx leaves out the captions of inner tables of contents."""
    generate = context["generate_toctree_html"]

    def grouped(kind: str, **options: Any) -> Any:
        tree = generate(kind, **options)
        soup = tree if isinstance(tree, BeautifulSoup) else BeautifulSoup(str(tree), "html.parser")
        for href, heading in _first_pages(app.srcdir).items():
            link = soup.find("a", href="#" if href == pagename else app.builder.get_relative_uri(pagename, href))  # type: ignore[union-attr]
            if link is not None and link.parent is not None:
                item = soup.new_tag("li", attrs={"class": "group"})
                item.string = heading
                link.parent.insert_before(item)
        return soup if tree is soup else str(soup)

    context["generate_toctree_html"] = grouped


@cache
def _first_pages(docs: str) -> Mapping[str, str]:
    """Return the heading of each group in the sidebar by its first page."""
    pages = {}
    for index in Path(docs).glob("*/index.md"):
        folder = index.parent.name
        pages |= {f"{folder}/{page}": heading for page, heading in groups(index.read_text(encoding="utf-8")).items()}
    return pages


def _process_signature(app: Sphinx, what: str, name: str, value: Any, options: object, signature: str | None, returned: str | None) -> Any:
    return annotations.signature(value) if signature else None


def _add_types(app: Sphinx, doctree: nodes.document) -> None:
    """Write the types of fields, properties and variables behind their names."""
    for signature in doctree.findall(addnodes.desc_signature):
        has_type = signature.parent["objtype"] in ("attribute", "property", "data") and "module" in signature
        if has_type and (written := annotations.of_variable(signature["module"], signature["fullname"])):
            signature += addnodes.desc_annotation("", ": ", *_linked(written))


def _link_names(app: Sphinx, doctree: nodes.document) -> None:
    """Let code in a text link to the reference if it is the full name of a public object, or a member of one: `Plan.even`."""
    page = app.env.docname
    if page == "reference/changelog":
        return  # which has names of earlier versions
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext()
        is_qualified = re.fullmatch(r"(jpipe|jpipe_planner|jpipe_train|jpipe_lm)\.[\w.]+|[A-Z]\w*\.\w+", name) or (
            page == "reference/api/index" and name in api.MODULES
        )
        if is_qualified and not isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref):
            literal.replace_self(_reference(name, literal.deepcopy()))


def _widen(app: Sphinx, doctree: nodes.document) -> None:
    """Let long lines of code and wide tables reach into the margin below the contents of the page, where the theme has nothing."""
    for block in doctree.findall(nodes.literal_block):
        if max(map(len, block.astext().splitlines()), default=0) > _LINE:
            block["classes"].append("full-width")
    for table in doctree.findall(nodes.table):
        rows = [[len(entry.astext()) for entry in row.findall(nodes.entry)] for row in table.findall(nodes.row)]
        if sum(map(max, zip(*rows, strict=False))) > _LINE:
            table["classes"].append("full-width")


def _linked(written: str) -> list[nodes.Node]:
    """Return the nodes of a type, in which public names link to the reference."""
    parts = re.split(r"([A-Za-z_][\w.]*)", written)
    return [_reference(part, nodes.Text(part)) for part in parts if part]


def _reference(name: str, content: nodes.Node) -> nodes.Node:
    if (target := full_name(name)) is None:
        return content
    return addnodes.pending_xref("", content, refdomain="py", reftype="obj", reftarget=target, refexplicit=True)


def _process_docstring(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Turn a docstring in Google's style into reStructuredText; for a variable it is searched where the variable is defined."""
    if what == "data":
        lines[:] = _docstrings_of_variables().get(name.rpartition(".")[2], [])
    text = re.sub(r"(`[^`]+`)(\w?)", lambda match: f"{match[1]}\\ {match[2]}" if match[2] else match[1], "\n".join(lines))
    text = re.sub(r"(?<!`)\bdocs/([\w/-]+)\.md\b", r":doc:`/\1`", text)
    is_whole = what not in ("attribute", "data", "property")  # of these napoleon takes what stands before a colon for a type
    lines[:] = GoogleDocstring(text.split("\n"), _GOOGLE, app, what if is_whole else "", name, value, options).lines()


@cache
def _docstrings_of_variables() -> Mapping[str, list[str]]:
    """Return the docstrings below public variables, by name, from the modules that assign them."""
    assigned = re.compile(rf"^({'|'.join(api.qualified_names())})\b.*?=", re.MULTILINE)
    analyzers = [ModuleAnalyzer.for_module(module.__name__) for module in api.modules()]
    documented = [analyzer.find_attr_docs() for analyzer in analyzers if assigned.search(analyzer.code)]
    return {name: lines for variables in documented for (scope, name), lines in variables.items() if not scope}


def _skip_member(app: Sphinx, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Leave out what a class describes as its attributes: the fields of a named tuple, and functions that are defaults of fields."""
    if inspect.isfunction(value) and "." not in value.__qualname__.replace("<locals>.", ""):
        return True
    docstring = inspect.getdoc(value) or ""
    return True if docstring.startswith(("Alias for field number", "Create new instance of")) else None


def _missing_reference(app: Sphinx, env: Any, node: addnodes.pending_xref, content: nodes.Element) -> nodes.Node | None:
    """Resolve a public name without its module, as signatures have it."""
    if node.get("refdomain") != "py" or (target := full_name(node["reftarget"])) in (None, node["reftarget"]):
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)
