"""The comparison of runs: what differs, the losses that are drawn, and a page that needs only itself."""

import itertools
import re

import pytest

from jpipe_train.checkpoint.history import part
from jpipe_train.cli import main
from jpipe_train.console.progress import Reporter
from jpipe_train.runs import comparing, picture
from jpipe_train.runs.reading import read
from tests.train.report.test_report import Page
from tests.train.runs.folders import PLAN, rows_of, write_run

WIDE = 1120 - 2 * 20 - 2 * 13  # pixels of the picture in the narrowest window that shows the wide one
PHONE = 390  # pixels
OTHER = PLAN.model_copy(update={"schedule": "pipedream_flush"})


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Write two runs that differ in their learning rate, and go to the folder that has them."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", rows_of(4), optimizer={"learning_rate": 0.001}, run={"dir": "a"})
    write_run(tmp_path / "b", rows_of(4, first=3.0), optimizer={"learning_rate": 0.003}, run={"dir": "b"})
    return "a", "b"


@pytest.fixture
def undrawn(monkeypatch):
    """Draw nothing: a picture takes longer than all else."""
    monkeypatch.setattr(picture, "to_svg", lambda figure: f"<svg>{picture.CREATOR}</svg>")


def curve(label="a", steps=4, tokens=100, examples=4, first=5.0) -> picture.Curve:
    return picture.Curve(label, rows_of(steps, first), tokens, examples)


def test_what_differs_and_the_losses_are_printed_and_written(runs, tmp_path, capsys):
    assert main(["compare", *runs]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["optimizer.learning_rate", "0.001", "0.003"] in printed
    assert not any(words and words[0] in ("run.dir", "train.steps") for words in printed)
    assert ["validation", "loss,", "lowest", "4.5000", "at", "step", "3", "2.5000", "at", "step", "3"] in printed
    page = Page(tmp_path / "compare.html")
    assert "optimizer.learning_rate0.0010.003" in page.text
    assert "lowest lossb" in page.text
    assert (tmp_path / "compare.svg").read_text().startswith("<?xml")


def test_the_page_needs_only_itself_and_shows_hostile_names_as_text(tmp_path):
    hostile = '<img src=x onerror=alert(1)> $title "\x1b[2J'
    paths = [write_run(tmp_path / name, rows_of(4), seed=seed) for seed, name in enumerate((hostile, "_$b$"))]
    assert main(["compare", *map(str, paths), "--out", str(tmp_path / "out.html")]) == 0
    page = Page(tmp_path / "out.html")
    (image,) = page.all("img")
    (wide,) = page.all("source")
    assert image["src"].startswith("data:image/svg+xml;base64,")
    assert wide["srcset"].startswith("data:image/svg+xml;base64,")
    assert wide["srcset"] != image["src"]
    assert {"script", "link", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    assert r'<img src=x onerror=alert(1)> $title "\x1b[2J' in page.text
    assert "\x1b" not in page.source + (tmp_path / "out.svg").read_text()
    assert not re.search("<image|<text|<script|alert", (tmp_path / "out.svg").read_text())


def test_only_earlier_comparisons_are_overwritten(runs, tmp_path, capsys, monkeypatch):
    drawings = [picture.to_svg(picture.draw([curve()], ""))] * 6  # drawing takes longer than all else
    monkeypatch.setattr(picture, "to_svg", lambda figure: drawings.pop())
    for _ in range(2):
        assert main(["compare", *runs]) == 0
    for name in ("compare.html", "compare.svg"):
        ours = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text("mine")
        assert main(["compare", *runs]) == 2
        assert f"found another file '{name}'; choose another name" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
        (tmp_path / "ours").write_bytes(ours)
        (tmp_path / name).symlink_to("ours")
        assert main(["compare", *runs]) == 2
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(ours)
    assert main(["compare", *runs]) == 0
    assert drawings == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "compare: expected at least two run folders, found 1; write, for example, "),
        (["a", "b", "./a"], "compare: expected each run once, found 'a' twice; remove one of them"),
        (["a", "c"], "'c' is not a run folder: it has no config.yaml"),
        (["a", "b", "--out", "c.png"], "--out: expected the name of a page, such as compare.html, found 'c.png'; end it with .html"),
        (["a", "b", "--out", "no/c.html"], "--out: cannot write 'no/c.html': No such file or directory; choose another file"),
    ],
)
def test_mistakes_are_reported_in_a_line(runs, arguments, message, capsys, undrawn):
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_plans_and_keys_of_other_versions_are_compared_too(tmp_path):
    one = write_run(tmp_path / "one", rows_of(4))
    other = write_run(tmp_path / "other", [], runs=OTHER)
    (other / "config.yaml").write_text("train: {steps: 9, batch_size: 4}\nnew: {key: [1, x]}\n")
    comparison = comparing.gather([read(path, whole=True) for path in (one, other)])
    assert comparison.differences["train.steps"] == ["4", "9"]
    assert comparison.differences["new.key"] == ["–", '[1, "x"]']
    assert comparison.differences["plan.schedule"] == ["pipedream_flush", "–"]
    assert "the plan" not in comparison.differences
    assert comparison.results["training loss, last"] == ["4.2500", "–"]
    assert comparison.best == (0,)


def test_no_run_is_the_best_if_the_units_differ_and_one_kind_of_loss_decides(tmp_path):
    def best(*names):
        return comparing.gather([read(tmp_path / name, whole=True) for name in names]).best

    write_run(tmp_path / "text", rows_of(4))
    write_run(tmp_path / "other", rows_of(4, first=3.0), loss={"target": "a:b"})
    assert (best("text", "other"), best("text")) == ((), (0,))
    write_run(tmp_path / "validated", [{"step": 0, "loss": 3.0, "val_loss": 1.0}])
    write_run(tmp_path / "trained", [{"step": 0, "loss": 2.0}])
    assert best("validated", "trained") == (1,)


def test_runs_with_equal_losses_are_all_named(tmp_path, undrawn):
    for name, first in (("a", 5.0), ("b", 4.0), ("c", 4.0)):
        write_run(tmp_path / name, rows_of(4, first))

    def text(*names):
        comparing.compare([tmp_path / name for name in names], tmp_path / "out.html", Reporter(1, 1, "steps"))
        return Page(tmp_path / "out.html").text

    assert "lowest lossb, c" in text("a", "b", "c")
    assert "lowest lossequal in all runs" in text("b", "c")


def test_tokens_count_the_batch_sizes_of_the_earlier_parts_of_a_run(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run", rows_of(4), saved=(3,))
    parts = [part(PLAN, {"train": {"batch_size": size}}, 1, first, end, 0) for first, end, size in ((0, 2, 16), (2, 3, 4))]
    monkeypatch.setattr(comparing.Checkpoint, "facts", {"history": [part.model_dump(mode="json") for part in parts]})
    drawn = comparing._curve("run", read(path, whole=True))
    assert drawn.earlier == [(0, 2, 16), (2, 3, 4)]
    figure = picture.draw([picture.Curve("run", rows_of(4), None, 4, drawn.earlier)], "")
    assert list(figure.axes[1].lines[0].get_xdata()) == [0, 16, 32, 36]
    figure = picture.draw([picture.Curve("run", rows_of(4), 40, 4, drawn.earlier)], "")
    assert list(figure.axes[1].lines[0].get_xdata()) == [0, 160, 320, 360]


@pytest.mark.parametrize("arguments", [["s"], ["s/sweep.json", "s/compare.html", "s/one", "s/two"]])
def test_the_folder_of_a_sweep_stands_for_its_runs(tmp_path, monkeypatch, arguments, capsys, undrawn):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one", "two")):
        write_run(tmp_path / "s" / name, rows_of(4), seed=seed)
    (tmp_path / "s" / "empty").mkdir()
    for name in ("sweep.json", "compare.html"):
        (tmp_path / "s" / name).touch()
    assert main(["compare", *arguments]) == 0
    assert "seed  0    1  " in capsys.readouterr().out


def test_plans_from_files_are_compared_in_words(tmp_path):
    one = write_run(tmp_path / "one", rows_of(4), plan={"file": "a.json"})
    comparison = comparing.gather(
        [read(path, whole=True) for path in (one, write_run(tmp_path / "two", [], runs=OTHER, plan={"file": "b.json"}))]
    )
    assert comparison.differences == {"plan.file": ["a.json", "b.json"], "the plan": ["gpipe, 2 stages", "pipedream_flush, 2 stages"]}


def test_a_plan_from_a_file_and_one_from_keys_are_compared_in_words(tmp_path):
    keys = {"schedule": "pipedream_flush", "num_stages": 2, "microbatches": 2}
    one = write_run(tmp_path / "one", rows_of(4), plan={"file": "a.json"})
    other = write_run(tmp_path / "two", [], runs=OTHER, plan=keys)
    third = write_run(tmp_path / "three", [], runs=OTHER, plan=keys | {"recompute": "full"})
    one, other, third = (read(path, whole=True) for path in (one, other, third))
    assert comparing.gather([one, other]).differences == {
        "plan.file": ["a.json", "null"],
        "the plan": ["gpipe, 2 stages", "pipedream_flush, 2 stages"],
    }
    assert comparing.gather([one, other, third]).differences["plan.recompute"] == ["–", "auto", "full"]


def test_of_many_runs_the_best_are_drawn_and_each_is_a_line_of_the_tables(tmp_path):
    paths = [write_run(tmp_path / f"run {n}", rows_of(4, first=9.0 - n / 4), seed=n) for n in range(picture.MOST_DRAWN + 2)]
    comparison = comparing.gather([read(path, whole=True) for path in paths])
    assert comparing._drawn(comparison) == list(range(2, picture.MOST_DRAWN + 2))
    text = comparing._page(comparison, "<svg/>", "<svg/>", "nats", range(picture.MOST_DRAWN))
    assert "The 12 runs with the lowest losses are drawn; 2 are left out." in text
    assert '<tr><th scope="row">run 3</th>' in text


def test_the_panels_have_the_losses_against_steps_tokens_and_time():
    figure = picture.draw([curve(tokens=10**6), curve("b", first=3.0, tokens=10**6)], "nats")
    assert [axes.get_xlabel() for axes in figure.axes] == ["step", "tokens (millions)", "time since the first step (seconds)"]
    assert {axes.get_ylabel() for axes in figure.axes} == {"loss (nats)"}
    for axes, places in zip(figure.axes, ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1.5, 3, 4.5]), strict=True):
        line, points, *_ = axes.lines
        assert (list(line.get_xdata()), list(line.get_ydata())) == (places, [5.0, 4.75, 4.5, 4.25])
        assert (list(points.get_xdata()), list(points.get_ydata())) == ([places[0], places[2], places[3]], [5.25, 4.75, 4.5])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_without_tokens_the_panel_has_examples_and_long_times_are_in_hours():
    rows = [{"step": step, "loss": 2.0, "seconds": 3600.0 * step} for step in range(3)]
    figure = picture.draw([curve(), picture.Curve("b", rows, None, 4)], "")
    assert [axes.get_xlabel() for axes in figure.axes] == ["step", "examples", "time since the first step (hours)"]
    assert list(figure.axes[1].lines[2].get_xdata()) == [0, 4, 8]
    assert list(figure.axes[2].lines[2].get_xdata()) == [0, 1, 2]
    assert figure.axes[0].get_ylabel() == "loss"


def test_many_losses_are_smoothed_and_few_points_are_drawn():
    axes = picture.draw([curve(steps=5000)], "").axes[0]
    line, points = axes.lines
    assert len(line.get_xdata()) <= 502
    assert len(points.get_xdata()) <= 32
    assert line.get_ydata()[0] == 5.0
    assert list(line.get_xdata())[-1] == 4999


def test_only_runs_of_many_losses_are_called_smoothed(tmp_path):
    def words(*steps: int) -> tuple[str, bool]:
        paths = [write_run(tmp_path / str(steps) / str(each), rows_of(each), seed=each) for each in steps]
        comparison = comparing.gather([read(path, whole=True) for path in paths])
        figure = picture.draw([curve(steps=each) for each in steps], "")
        has_means = "as running means where there are 80 or more" in comparing._page(comparison, "", "", "", range(len(steps)))
        return figure.legends[0].get_title().get_text(), has_means

    assert words(79, 20) == ("lines: training; points: validation", False)
    assert words(80, 20) == ("lines: training (in part smoothed); points: validation", True)
    assert words(80, 100) == ("lines: training (smoothed); points: validation", True)


def test_the_picture_for_wide_windows_has_its_panels_beside_each_other_and_can_be_read():
    curves = [curve(f"learning_rate={n},schedule=gpipe") for n in range(4)]
    figure = picture.draw(curves, "nats", wide=True)
    svg = picture.to_svg(figure)
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)', svg).groups())
    sizes = [100 * float(scale) for scale in re.findall(r"scale\(([\d.]+) -", svg)]
    assert min(sizes) * WIDE / width >= 11
    assert width > 2 * height
    assert len({round(axes.get_position().y0, 3) for axes in figure.axes}) == 1


def test_runs_differ_without_their_colours():
    looks = [picture._look(number) for number in range(picture.MOST_DRAWN)]
    assert len({str((look["linestyle"], look["marker"])) for look in looks}) == len(looks)
    assert len({str(sorted(look.items(), key=str)) for look in looks}) == len(looks)
    assert all(first["color"] != second["color"] for first, second in itertools.pairwise(looks))


def test_the_picture_can_be_read_on_a_phone_and_has_no_date():
    curves = [curve(f"learning_rate={n},schedule=gpipe") for n in range(3)]
    svg = picture.to_svg(picture.draw(curves, "nats per byte"))
    width = float(re.search(r'viewBox="0 0 ([\d.]+) ', svg)[1])
    sizes = [100 * float(scale) for scale in re.findall(r"scale\(([\d.]+) -", svg)]  # of text, in points
    assert min(sizes) * PHONE / width >= 11
    assert svg == picture.to_svg(picture.draw(curves, "nats per byte"))
    assert "dc:date" not in svg
