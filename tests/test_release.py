"""What a release says about itself: version, date, classifiers and citation agree with each other and with the code."""

import datetime
import re
import tomllib

import pytest
import trove_classifiers
import yaml

import jpipe
from tests.packages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def citation() -> dict:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_version_is_defined_once():
    assert PROJECT["version"] == jpipe.__version__


def test_the_citation_has_what_its_format_requires(citation):
    """See the schema of the Citation File Format 1.2.0."""
    assert citation["cff-version"] == "1.2.0"
    assert set(citation) >= {"message", "title", "authors"}
    assert citation["type"] == "software"
    for entry in (citation, *citation["references"]):
        assert entry["title"]
        assert all("name" in author or {"family-names", "given-names"} == set(author) for author in entry["authors"])
    assert all(isinstance(reference["year"], int) and reference["type"] for reference in citation["references"])


def test_the_citation_is_of_this_version(citation):
    assert citation["version"] == jpipe.__version__
    assert citation["license"] == PROJECT["license"]
    assert set(citation["keywords"]) <= set(PROJECT["keywords"])


def test_the_newest_release_in_the_changelog_is_this_version(citation):
    released = isinstance(citation["date-released"], datetime.date) and citation["date-released"].isoformat()
    first = re.search(r"^## (?!Unreleased$)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert first == f"{jpipe.__version__} ({released})"


def test_the_classifiers_exist():
    assert set(PROJECT["classifiers"]) <= trove_classifiers.classifiers


def test_a_public_address_is_the_same_everywhere(citation):
    addresses = {PROJECT.get("urls", {}).get("Repository"), citation.get("repository-code")}
    assert len(addresses) == 1
