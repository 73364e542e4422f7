"""The pictures of the documentation: what the charts show is in the tables, and every file can be read on a phone."""

import re
from pathlib import Path

import pytest

import jpipe
from benchmarks.learning import links, report
from benchmarks.learning.__main__ import WRITTEN
from benchmarks.papers.document import Table, read
from docs import charts, style

ROOT = Path(__file__).parents[1]
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PHONE = 390  # pixels

SHARES = """
| share of the ceiling | m = 8 | goal | m = 2 | goal |
|---|---|---|---|---|
| PyTorch DDP | 0.83 | | 0.78 | |
| jpipe `gpipe` | 0.82 | 0.84, missed | 0.58 | 0.63, missed |
| jpipe `pipedream_2bw`+1 | 1.00 | 0.97 | 0.99 | 0.97 |
"""
LINKS = """
<!-- links -->

| | 2 hosts: straight | 2BW | 4 hosts: straight | replicated | 2BW | bytes, 4 hosts |
|---|---|---|---|---|---|---|
| one | 1.6, 5.8, 13.4 | 1.7, 4.1, 14.5 | 2.6, 6.3, 6.6 | 2.7, 8.3, 18.8 | 3.4, 5.7, 6.6 | −86% to −98% |
| two | 2.1, 5.7, 13.5 | 2.2, 4.2, 13.3 | 1.5, 3.5, 6.1 | 2.9, 5.2, 5.4 | 1.3, 4.0, 7.5 | −90% to −98% |
"""


def test_tables_are_read_from_a_page_with_their_names():
    shares, links = read(f"# Page\n{SHARES}\ntext | text\n{LINKS}")
    assert (shares.name, shares.rows[0]) == ("", ["PyTorch DDP", "0.83", "", "0.78", ""])
    assert (links.name, len(links.head), len(links.rows)) == ("links", 7, 2)
    table = Table("one", ["a", "b"], [["1", "2"], ["", "4"]])
    assert read(f"<!-- one -->\n\n{table.text}") == [table]


def test_the_chart_of_speed_shows_the_numbers_of_the_tables():
    shares, *models = charts.speed(read(SHARES + LINKS)).axes
    bars = [(round(bar.get_y() + bar.get_height() / 2), bar.get_width()) for bar in shares.patches if bar.get_width()]
    assert bars == [(0, 0.83), (1, 0.82), (2, 1.0), (0, 0.78), (1, 0.58), (2, 0.99)]
    assert [label.get_text() for label in shares.get_yticklabels()] == ["PyTorch DDP", "jpipe gpipe", "jpipe pipedream_2bw+1"]
    assert len({bar.get_facecolor() for bar in shares.patches if bar.get_width()}) == 6  # others, flush, delayed; each dark and light
    fast, slower, slowest, _ = models[0].lines
    assert (list(fast.get_xdata()), list(slowest.get_xdata())) == ([1.6, 1.7, 2.6, 2.7, 3.4], [13.4, 14.5, 6.6, 18.8, 6.6])
    assert list(slower.get_ydata()) == [0, 1, 2, 3, 4]
    assert [label.get_text() for label in models[1].get_yticklabels()][2:4] == ["PipeDream, 4 hosts", "with replicas, 4 hosts"]


def test_the_charts_tables_are_on_the_pages():
    tables = charts.tables_of_pages()
    assert len(charts.find(tables, "share of the ceiling", "goal").rows) > 10
    assert len(charts.find(tables, "2 hosts: straight", "replicated").rows) == 2
    with pytest.raises(jpipe.InputError, match="expected a table with the columns no such cell, found none"):
        charts.find(tables, "no such cell")


def test_the_chart_of_time_to_a_loss_shows_the_seconds_of_the_runs():
    runs = [
        {"recipe": recipe, "rate": rate, "sent_bytes": 10, "curve": [[10, 2.0, 3.0], [20, 4.0 + n + rate / 1e9, 2.0]]}
        for n, recipe in enumerate(links.RECIPES)
        for rate in links.RATES
    ]
    slow, fast = links.draw(runs).axes
    for axes, rate in ((slow, 1e8), (fast, 1e9)):
        assert [bar.get_width() for bar in axes.patches] == [4.0 + n + rate / 1e9 for n in range(len(links.RECIPES))]
        assert [label.get_text() for label in axes.get_yticklabels()] == [*links.RECIPES]


def test_the_tables_of_the_pages_are_those_of_the_runs_that_the_chart_shows():
    pages = {table.name: table for table in charts.tables_of_pages()}
    tables = [table for table in report.tables(charts.results(), "") if table.name.startswith(WRITTEN)]
    assert [table.name for table in tables] == ["GPT, 4 stages", "GPT, 8 stages"]
    assert all(read(f"<!-- {table.name} -->\n\n{table.text}") == [pages[table.name]] for table in tables)


def test_the_same_picture_gives_the_same_file(tmp_path):
    for name in ("one.svg", "two.svg"):
        style.write(charts.speed(read(SHARES + LINKS)), tmp_path / "new" / name)
    text = (tmp_path / "new" / "one.svg").read_text()
    assert text == (tmp_path / "new" / "two.svg").read_text()
    assert "date" not in text


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_can_be_read_on_a_phone(path):
    assert path.suffix == ".svg"
    text = path.read_text()
    assert len(text) < 150_000
    assert not re.search("dc:date|<image|<text", text)  # the same everywhere, sharp at any size
    width = float(re.search(r'viewBox="0 0 ([\d.]+) ', text)[1])
    assert re.search(rf'^<path d="M0 ([\d.]+)H{width:g}V0H0z" style="fill: #ffffff"', text, re.MULTILINE)
    sizes = [100 * float(scale) for scale in re.findall(r"scale\(([\d.]+) -", text)]  # of text, in points
    assert min(sizes) * PHONE / width >= 11


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_page_shows_each_picture(path):
    assert any(re.search(rf"!\[[^]]+\]\([^)]*pictures/{re.escape(path.name)}\)", page.read_text()) for page in PAGES)
