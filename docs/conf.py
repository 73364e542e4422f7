"""Configure the documentation site for Sphinx: `make docs`."""

import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent)]

from docs import extension  # noqa: E402 - found by the path that is set above

PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "jpipe"
author = "the authors of jpipe"
copyright = author
version = release = PROJECT["version"]
language = "en"
highlight_language = "none"  # of blocks that name no language, such as commands

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton"]
if not tags.has("fast"):  # noqa: F821 — Sphinx defines it; `sphinx-build -t fast` leaves the pages of source code out
    extensions.append("sphinx.ext.viewcode")
exclude_patterns = ["**/__pycache__"]
myst_heading_anchors = 4  # links to headings, as in the repository's web view
myst_links_external_new_tab = False

autodoc_typehints = "none"  # docs/annotations.py writes them
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autosummary_generate = False
default_role = "name"  # `x` in a docstring; see docs/extension.py
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = f"jpipe {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "static" / "scorer.js")
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the sidebar has the search
    "footer_content_items": [],
}
html_show_copyright = False
html_copy_source = False
nitpicky = True
nitpick_ignore_regex = extension.FOREIGN_NAMES

setup = extension.setup
