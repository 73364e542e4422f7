"""The tables of measurements on the pages equal the data that the repository has."""

import json
from pathlib import Path

import pytest

import jpipe
from benchmarks import tables
from benchmarks.papers.document import put, read
from benchmarks.peers import report

PAGES = (
    "benchmarks",
    "benchmarks-hosts",
    "benchmarks-peers",
    "fault-tests",
    "gpu",
    "planner-accuracy",
    "time-to-accuracy",
)
"""Those whose tables all are measurements."""
OTHERS = "communication", "long-rows", "recipes"


@pytest.fixture(scope="module")
def of_pages():
    return tables.of_pages()


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_each_table_of_a_page_is_made_from_data(page, of_pages):
    text = tables.file_of(page).read_text(encoding="utf-8")
    on_page = read(text)
    if page in PAGES:
        assert [table.head for table in on_page if not table.name] == [], "`<!-- NAME -->` above a table says which of the data it shows"
        assert {table.name for table in on_page} == {*of_pages[page]}
    assert put(text, {name: table.text for name, table in of_pages[page].items()}) == text, "run python -m benchmarks.tables"


def test_every_file_says_where_its_figures_come_from():
    files = sorted(tables.DATA.glob("*.json"))
    assert {path.stem for path in files} == {*PAGES, *OTHERS}
    for path in files:
        data = json.loads(path.read_text(encoding="utf-8"))
        assert data["source"]
        for table in data["tables"]:
            assert table["command"], table["name"]
            assert table["machine"], table["name"]
            assert {len(row) for row in table["rows"]} == {len(table["head"])}, table["name"]


def test_no_table_has_two_sources():
    kept = {table.name for table in tables.from_results()}
    assert [name for page in PAGES for name in tables.transcribed(page) if name in kept] == [], "remove it from benchmarks/data"


def results(folder: Path, name: str, microbatches: int, **shares: list[float]) -> None:
    """Write results of a run, as `python -m benchmarks.peers` does."""
    names = {"flush": "jpipe pipedream_flush", "late": "jpipe pipedream_2bw+1", "parts": "jpipe DP, 4 sum parts", "torch": "torch 1F1B"}
    rows = [{"name": names[key], "share_of_ceiling": 0.5, "shares": values} for key, values in shares.items()]
    rows += [{"name": "jpipe naive", "failed": "no"}, {"name": "times of the stages", "stage_seconds": [1.0, 1.0]}]
    (folder / f"{name}.json").write_text(json.dumps({"machine": {}, "runs": [{"microbatches": microbatches, "rows": rows}]}))


def test_several_runs_beside_each_other_are_ranges_of_their_medians(tmp_path):
    assert report.tables(tmp_path) == []
    results(tmp_path, "one", 8, flush=[0.9, 0.5, 0.8], late=[1.0, 1.1, 1.2], torch=[1.0, 1.0, 1.0])
    results(tmp_path, "two", 8, flush=[0.9, 0.9, 0.1], late=[0.96, 0.96, 0.96], torch=[0.9, 0.5, 0.9])
    results(tmp_path, "three", 2, flush=[0.7, 0.7, 0.7], parts=[0.9, 0.9, 0.9])
    shares, against = report.tables(tmp_path)
    assert list(shares.head) == ["share of the ceiling", "m = 8", "goal", "m = 2", "goal"]
    assert shares.rows == [
        ["PyTorch 1F1B", "0.90 to 1.00", "", "", ""],
        ["jpipe `pipedream_flush`", "0.80 to 0.90", "0.86, missed in 1 of 2 runs", "0.70", "0.65"],
        ["jpipe `pipedream_2bw`+1", "0.96 to 1.10", "0.97, missed in 1 of 2 runs", "", ""],
        ["jpipe, DP in 4 parts", "", "", "0.90", "0.92, missed"],
    ]
    assert against.rows == [["`pipedream_flush`", "1F1B", "0.80 to 1.00", ""], ["`pipedream_2bw`+1", "1F1B", "1.07 to 1.10", ""]]


def test_other_files_are_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"runs": [{"microbatches": 3, "rows": []}]}')
    with pytest.raises(jpipe.InputError, match=r"other\.json': expected results of python -m benchmarks\.peers, found KeyError\(3\)"):
        report.tables(tmp_path)
