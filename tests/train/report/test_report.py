"""The report of a run: numbers in the pictures, a complete and safe page, and its view in a browser."""

import base64
import dataclasses
import math
import re
from html.parser import HTMLParser

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest

import jpipe
from jpipe_train.checkpoint.history import RunPart
from jpipe_train.report import loss_curve, page
from jpipe_train.report import report as report_module
from jpipe_train.report.performance import comparison, stage_times
from jpipe_train.report.performance.comparison import Comparison, as_predicted, compare, compare_with_plan, why_slower
from jpipe_train.report.performance.stage_times import Stage, slow_ranks, slow_words
from jpipe_train.report.report import Report, write_report
from jpipe_train.report.summary import slow_of
from tests.train import browser

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'too' $title $no_such ${x} <img src=http://127.0.0.1:9/x> \udcff ✓"
STEPS = 300


def rows_of(steps=STEPS) -> list[dict]:
    rows = [{"step": step, "loss": 2 + 3.5 * math.exp(-step / 14) + 0.05 * math.sin(7 * step)} for step in range(steps)]
    for row in rows[::50]:
        row["val_loss"] = row["loss"] + 0.1
    return rows


def window(slower: float = 1.0, memory: bool = True) -> jpipe.programs.Window:
    """Return a window of three batches of three stages that is `slower` than its costs."""
    plan = jpipe.Plan.even("abc", num_stages=3, schedule="pipedream_2bw", microbatches=3)
    cost = {"weights": 12_000_000, "accumulators": 12_000_000, "residuals": 5_000_000, "optimizer": 24_000_000}
    costs = [jpipe.programs.StageCost(forward=0.01 * slower, backward=0.02 * slower, update=0.003, **cost)] * 3
    run = jpipe.simulate(jpipe.lower(plan, batches=6), costs)
    return jpipe.programs.extract_window(run.timeline, run.memory if memory else ((), (), ()), 3, first=2, batches=3)


def report(**parts) -> Report:
    facts = {"schedule": "pipedream_2bw, 3 stages", "text": "the standard library"}
    return Report(**({"title": "A run", "facts": facts, "rows": rows_of(), "predicted": window(), "measured": window(1.1)} | parts))


class Page(HTMLParser):
    """The tags of a page in order, with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags, self.text = [], ""
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a written report."""
    path = tmp_path_factory.mktemp("run")
    write_report(path, report())
    return path


def written(path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


@pytest.mark.oldest
def test_a_whole_report_is_five_files_and_the_page_needs_only_itself(folder):
    assert written(folder) == {"loss.png", "timeline.png", "memory.png", "trace.json", "report.html"}
    whole = Page(folder / "report.html")
    images = [image["src"].removeprefix("data:image/png;base64,") for image in whole.all("img")]
    assert [base64.b64decode(data) for data in images] == [(folder / f"{name}.png").read_bytes() for name in ("loss", "timeline", "memory")]
    assert (folder / "trace.json").read_text() == jpipe.to_perfetto({"predicted": window().timeline, "measured": window(1.1).timeline})


def test_the_panel_of_a_prediction_says_that_transfers_are_not_predicted(tmp_path, monkeypatch):
    drawn, draw = [], jpipe.draw_timeline
    monkeypatch.setattr(jpipe, "draw_timeline", lambda *panels, **options: drawn.append(panels) or draw(*panels))
    message = jpipe.programs.Transfer("activation", (0, 1), 3, 0.01, 0.02, 0.02, 100.0)
    measured = dataclasses.replace(window(1.1), transfers=(message,))
    write_report(tmp_path, report(measured=measured))
    assert [list(each) for each in drawn[0]] == [["predicted (transfers are not predicted)", "measured"]] * 2
    assert drawn[0][1]["measured"] == (message,)
    write_report(tmp_path, report())
    assert list(drawn[1][0]) == ["predicted", "measured"]


def test_the_page_shows_the_results(folder):
    text = Page(folder / "report.html").text
    losses = [row["val_loss"] for row in rows_of() if "val_loss" in row]
    result = f"validation loss, nats per byte{losses[0]:.3f} → {losses[-1]:.3f}"
    for words in ("A run", "pipedream_2bw, 3 stages", "the standard library", result):
        assert words in text
    for row in compare(window(), window(1.1)):
        assert "".join(row) in text  # the cells of a line of the table


def parts(count: int = 2) -> list[RunPart]:
    same = {"optimizer": "adamw", "devices": 3, "seconds": 61}
    return [
        RunPart(first=100 * i, end=100 * i + 100, plan=f"plan {i}", began=f"2026-01-{i % 9 + 1:02} 10:00:00", **same) for i in range(count)
    ]


STAGES = [
    Stage(("embed", "block_0"), 1_200_000, ((0, 0),)),
    Stage(("block_1",), 800_000, ((1, 0),)),
    Stage(tuple("abcd"), 65_000, ((2, 0),)),
]


def test_the_duration_is_that_of_the_parts_and_stands_once(tmp_path):
    rows = [row | {"seconds": 598.0} for row in rows_of()]
    write_report(tmp_path, report(rows=rows, parts=parts(1), predicted=None, measured=None))
    text = Page(tmp_path / "report.html").text
    assert (text.count("duration"), text.count("1:01"), text.count("9:58")) == (1, 1, 0)


@pytest.mark.parametrize(("boxes", "columns"), [(2, (3, 4)), (5, (3, 5)), (7, (4, 7)), (8, (4, 4)), (9, (3, 5)), (13, (4, 7))])
def test_no_result_stands_alone_in_a_row_of_a_wide_page(boxes, columns):
    assert boxes % columns[1] != 1
    text = page.results({str(number): "1" for number in range(boxes)})
    assert f'class="results few-{columns[0]} many-{columns[1]}"' in text


@pytest.mark.slow
def test_the_page_shows_the_times_of_each_stage_and_the_parts_of_a_run(tmp_path):
    rows = rows_of()
    for row in rows:
        row |= {
            "learning_rate": min(row["step"] + 1, 301 - row["step"]) * 1e-5,
            "seconds": 2.0 * row["step"],
            "tokens_per_second": 12_345.6,
        }
    write_report(tmp_path, report(rows=rows, stages=STAGES, parts=parts()))
    text = Page(tmp_path / "report.html").text
    for cells in (
        ("stage", "layers", "parameters", "forward, ms", "backward, ms", "both in one, ms", "busy"),
        ("0", "embed block_0", "1,200,000", "11", "22", "–"),
        ("2", "a … d (4)", "65,000", "–", "–", "33"),
        ("0 to 99", "plan 0", "adamw", "3", "2026-01-01 10:00:00", "1:01"),
        ("100 to 199", "plan 1"),
        ("duration", "2:02", "tokens per second", "12,300", "learning rate", "1e-05 → 0.00151 → 2e-05"),
    ):
        assert "".join(cells) in text
    assert "Times are medians over the measured microbatches" in text
    write_report(tmp_path, report(stages=STAGES, parts=parts(60), predicted=None, measured=None))
    text = Page(tmp_path / "report.html").text
    assert "The 10 parts before these are left out." in text
    assert "1,000 to 1,099" in text
    assert "900 to 999" not in text
    assert "stagelayersparameters" in text
    seen = browser.inspect(tmp_path / "report.html", width=390)
    assert seen["needs_width"] <= 390


def test_nothing_in_the_page_leads_outside(folder):
    page = Page(folder / "report.html")
    assert not {tag for tag, _ in page.tags} & {"script", "link", "a", "iframe", "object", "embed", "form", "base"}
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert [
        name for _, attributes in page.tags for name in attributes if name in ("href", "srcset", "style") or name.startswith("on")
    ] == []
    assert not re.search(r"url\(|@import|https?:", re.sub(r"base64,[^\"]*", "", page.source))
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_pictures_have_words_and_tables_have_headers(folder):
    page = Page(folder / "report.html")
    for image, words in zip(page.all("img"), ("from 5.6 to 2.09", "rank", "at most: rank 0"), strict=True):
        assert words in image["alt"]
    assert [header["scope"] for header in page.all("th")].count("col") == 4
    assert len(page.all("tr")) == 2 + 1 + len(compare(window(), window(1.1)))
    assert all("scope" in header for header in page.all("th"))
    assert page.all("html") == [{"lang": "en"}]


def test_no_word_from_outside_becomes_markup(tmp_path, folder):
    write_report(tmp_path, report(title=HOSTILE, facts={HOSTILE: HOSTILE}, unit="<b>$x"))
    page, usual = Page(tmp_path / "report.html"), Page(folder / "report.html")
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in usual.tags}
    assert {name for _, names in page.tags for name in names} == {name for _, names in usual.tags for name in names}
    assert page.text.count(HOSTILE.replace("\udcff", "?")) == 4  # the title, twice; a fact and its name
    assert "validation loss, <b>$x" in page.text


def test_missing_files_are_reported(tmp_path):
    write_report(tmp_path, report(rows=[], predicted=None, measured=None))
    assert written(tmp_path) == {"report.html"}
    text = Page(tmp_path / "report.html").text
    for words in ("there is no curve", "nothing to compare", "there is no timeline", "there is no picture of it"):
        assert words in text


def test_a_prediction_alone_is_shown_as_one(tmp_path):
    write_report(tmp_path, report(measured=None, predicted=window(memory=False)))
    assert written(tmp_path) == {"loss.png", "timeline.png", "trace.json", "report.html"}
    text = Page(tmp_path / "report.html").text
    assert "This is the prediction alone: the run was not traced." in text
    assert "there is no picture of it" in text
    assert "bubble, predicted" in text


def test_only_figures_known_to_both_are_compared():
    predicted = jpipe.programs.Window(
        ((),), ((jpipe.programs.MemorySample(0.0, {0: 1500}, 0, 0, 0, 0),), ()), seconds=0.5, batches=4, bubble=0.2
    )
    measured = jpipe.programs.Window(
        ((),), ((jpipe.programs.MemorySample(0.0, {0: 1800}, 0, 0, 0, 0),), ()), seconds=0.5, batches=2, bubble=0.25
    )
    step, bubble, memory = compare(predicted, measured)  # nothing is known of the second rank's memory
    assert step == Comparison("time of a step", "125 ms", "250 ms", "2.00")
    assert bubble == Comparison("bubble (idle share)", "20.0%", "25.0%", "1.25")
    assert memory == Comparison("held memory, rank 0", "1.5 kB", "1.8 kB", "1.20")
    *_, same, peak = compare(predicted, measured, (500, 100))
    assert same == memory
    assert peak == Comparison("peak memory, rank 0", "2 kB", "2.3 kB", "1.15")
    assert compare(predicted, measured, (None, 100)) == [step, bubble, memory]  # of another process, whose programs are not known here
    assert compare(None, measured)[0] == Comparison("time of a step", "–", "250 ms", "–")
    assert compare(predicted, None)[2] == Comparison("held memory, rank 0", "1.5 kB", "–", "–")


def test_temporaries_of_other_processes_are_reported_as_unknown():
    whole = "peak memory is the held memory plus the temporaries of the largest compiled program: 5 B at rank 0"
    assert comparison.temporary_words([5]) == whole
    assert comparison.temporary_words([5, None]) == f"{whole}; the temporaries of other ranks are known only in their processes"
    assert comparison.temporary_words([None, None]) == ""


def test_measurements_are_shown_beside_the_plan():
    plan, measured = jpipe.Plan.even("ab", 2, "gpipe", 2), window()
    actual = as_predicted(plan, measured, [jpipe.programs.StageCost(temporary=1000), jpipe.programs.StageCost(temporary=2000, inputs=300)])
    assert actual.batch_seconds == measured.step_seconds
    assert actual.peak_bytes == (measured.held_bytes[0] + 1000, measured.held_bytes[1] + 2000)
    fused = as_predicted(
        plan.model_copy(update={"schedule": "pipedream"}),
        measured,
        [jpipe.programs.StageCost(), jpipe.programs.StageCost(inputs=300, labels=40)],
    )
    assert fused.peak_bytes[1] == measured.held_bytes[1] + 340  # one program takes its inputs and leaves nothing of them
    planned = jpipe.plan.Predicted(batch_seconds=2 * actual.batch_seconds, bubble=actual.bubble, peak_bytes=actual.peak_bytes)
    rows = compare_with_plan(plan, planned, actual)
    assert [row.ratio for row in rows] == ["0.50", *[row.ratio for row in rows[1:2]], "1.00", "1.00"]
    assert [row.quantity for row in rows][2:] == [f"peak memory, stage {s}" for s in (0, 1)]


def test_a_rank_holds_what_its_stages_hold_and_the_scratch_memory_of_the_program_that_runs():
    plan = jpipe.Plan.even("abcd", 4, "zb_v", 4, replicas=2)
    sizes = [jpipe.programs.StageCost(temporary=1000 * s, inputs=10, labels=5, weights=10_000) for s in range(4)]
    run = jpipe.simulate(jpipe.lower(plan, 4), sizes)
    measured = jpipe.programs.extract_window(run.timeline, run.memory, 4, first=1, batches=2)
    actual = as_predicted(plan, measured, sizes)
    assert len(measured.held_bytes) == 4
    assert actual.peak_bytes == (max(measured.held_bytes[:2]) + 3000 + 15, max(measured.held_bytes[2:]) + 2000)
    rows = compare_with_plan(plan, actual, actual)
    assert [row.quantity for row in rows][2:] == [f"peak memory, stages {stages}" for stages in ("0 3", "1 2")]


def test_the_times_of_a_stage_are_those_of_its_chunk_on_its_ranks():
    plan = jpipe.Plan.even("abcd", 4, "interleaved_zero_bubble", 4, chunks_per_rank=2)
    costs = [jpipe.programs.StageCost(forward=0.01 * (s + 1), backward=0.3, backward_input=0.1, backward_weight=0.2) for s in range(4)]
    run = jpipe.simulate(jpipe.lower(plan, 4), costs)
    window = jpipe.programs.extract_window(run.timeline, run.memory, 4, first=1, batches=2)
    stages = [Stage((layer,), 1, ((s % 2, s // 2),)) for s, layer in enumerate("abcd")]
    head, rows = stage_times.table(stages, window)
    expected = ("forward, ms", "backward, ms", "backward for inputs, ms", "backward for weights, ms", "forward and backward for inputs, ms")
    assert head[3:-1] == expected
    assert [row[3:8] for row in rows] == [
        ("10", "300", "–", "–", "–"), ("20", "–", "100", "200", "–"), ("30", "–", "100", "200", "–"), ("–", "–", "–", "200", "140"),
    ]  # fmt: skip
    busy = sum(int(row[-1].removesuffix("%")) for row in rows) / 2
    assert abs(busy / 100 - (1 - window.bubble)) < 0.02


def test_slices_are_told_from_microbatches():
    plan = jpipe.Plan.even("ab", 2, "gpipe", 2, slices=2)
    slices = [jpipe.programs.StageCost(forward=0.01 * n, backward=0.02 * n) for n in (1, 2)]
    run = jpipe.simulate(jpipe.lower(plan, 4), [dataclasses.replace(slices[0], by_slice=tuple(slices))] * 2)
    window = jpipe.programs.extract_window(run.timeline, run.memory, 4, first=1, batches=2)
    assert stage_times.microbatch_seconds(plan, window) == [{0: pytest.approx(0.09)}, {1: pytest.approx(0.09)}]
    sliced = report(plan=plan, measured=window, stages=[Stage(("a",), 1, ((0, 0),)), Stage(("b",), 1, ((1, 0),))])
    assert "medians over the measured slices of microbatches" in report_module._stages(sliced)
    assert "With 2 slices, numbers count slices: number n is slice n mod 2 of microbatch ⌊n / 2⌋." in report_module._timeline(sliced, b"")


@pytest.mark.slow
def test_an_explanation_of_much_slower_steps_is_shown(tmp_path):
    assert why_slower(window(), window(1.4)) is None
    assert why_slower(None, window()) is None
    assert why_slower(window(), None) is None
    assert why_slower(window(), window(2)) == "Steps take longer than predicted: other programs used the cores at the same time."
    assert "transfers between processes" in why_slower(window(), window(2), processes=2)
    short = why_slower(window(0.01), window(0.04))
    assert short.startswith("Steps take longer than predicted: the computations are so short (median 800 µs) that the host takes longer")
    for slower, words in ((window(2), "other programs used the cores"), (window(1.4), None)):
        write_report(tmp_path, report(rows=[], measured=slower))
        is_reported = "Steps take longer than predicted" in Page(tmp_path / "report.html").text
        assert is_reported == (words is not None)


def test_words_fit_what_was_logged(tmp_path):
    write_report(tmp_path, report(rows=rows_of()[::5], unit="", predicted=None, measured=None))
    text = Page(tmp_path / "report.html").text
    assert "The line is the loss of the batches that were logged; the points are validation losses." in text
    assert "validation loss5" in text  # a card of its own, without a unit
    figure = loss_curve.draw_losses(rows_of()[::5], "")
    assert figure.axes[0].get_ylabel() == "loss"
    assert "batches logged" in lines_of(rows_of()[::5])


# The loss curve --------------------------------------------------------------------------------------------------------------


def lines_of(rows) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each curve by its name in the legend."""
    (axes,) = loss_curve.draw_losses(rows, "nats").axes
    assert axes.get_ylabel() == "loss (nats)"
    return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines}


def test_every_loss_is_drawn_and_the_mean_is_a_mean():
    rows = rows_of()
    lines = lines_of(rows)
    assert lines["each batch"] == [(row["step"], row["loss"]) for row in rows]
    assert lines["validation"] == [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    losses = [row["loss"] for row in rows]
    width = len(losses) // 40 // 2
    for i in (0, 1, 2, 150, 298, 299):
        near = losses[i - min(i, width) : i + min(i, width) + 1]
        assert lines["running mean"][i] == (i, pytest.approx(np.mean(near), rel=1e-12))


@pytest.mark.parametrize(("above", "sign"), [(0.1, 1), (-0.1, -1)])
def test_the_last_validation_loss_stands_away_from_the_line(above, sign):
    rows = rows_of()
    rows[-1]["val_loss"] = rows[-1]["loss"] + above
    (axes,) = loss_curve.draw_losses(rows, "").axes
    (label,) = axes.texts
    assert label.get_text() == f"{rows[-1]['val_loss']:.3f}"
    assert label.xyann[1] * sign > 0


def test_changes_of_the_plan_are_marked(tmp_path):
    def marks(changes) -> tuple[list[float], list[str]]:
        (axes,) = loss_curve.draw_losses(rows_of(), "nats", changes).axes
        dashed = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]
        return dashed, [text.get_text() for text in axes.texts][1:]  # the first is that of the validation

    changes = [(40, "3\xa0stages"), (170, "pipedream_flush, 1 stage, replicas 2, 2 microbatches"), (175, "x" * 70)]
    lines = "pipedream_flush, 1\xa0stage,\nreplicas\xa02, 2\xa0microbatches"
    assert marks(changes) == ([40, 170, 175], ["3\xa0stages", lines, "\n".join(["x" * 30, "x" * 30, "xxx…"])])
    assert marks([]) == ([], [])
    many = [(step, "3 stages") for step in range(0, 300, 5)]
    assert marks(many) == (list(range(50, 300, 5)), [])
    parts = [RunPart(first=first, end=end, plan=f"gpipe, {n} stages", optimizer="", devices=n) for first, end, n in ((0, 9, 4), (9, 20, 3))]
    for shown in parts, parts[:1]:
        write_report(tmp_path, report(parts=shown, predicted=None, measured=None))
        page = Page(tmp_path / "report.html")
        assert ("Dashed lines mark the steps at which the run continued with another plan." in page.text) == (len(shown) == 2)
        assert ("The plan changed at step 9: 3 stages." in page.source) == (len(shown) == 2)


def test_the_words_of_a_change_are_inside_the_axes_and_away_from_the_last_loss():
    rows = [{"step": step, "loss": 2.3 + 3 * 0.97**step} for step in range(220)]
    rows[-1]["val_loss"] = 2.2
    changes = [(3, "gpipe, 4 stages, 4 microbatches"), (200, "pipedream_flush, 1 stage, replicas 2, 2 microbatches")]
    figure = loss_curve.draw_losses(rows, "nats", changes)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    inside, (last, *labels) = axes.get_window_extent(), [text.get_window_extent() for text in axes.texts]
    for label in labels:
        assert inside.x0 <= label.x0 < label.x1 <= inside.x1
        assert inside.y0 <= label.y0 < label.y1 <= inside.y1
        assert not label.overlaps(last)


def test_losses_that_are_not_finite_are_left_out_and_counted(tmp_path):
    rows = rows_of()
    rows[7]["loss"], rows[8]["loss"], rows[50]["val_loss"] = math.nan, math.inf, -math.inf
    lines = lines_of(rows)
    assert [step for step, _ in lines["each batch"]] == [step for step in range(STEPS) if step not in (7, 8)]
    assert [step for step, _ in lines["validation"]] == [0, 100, 150, 200, 250]
    write_report(tmp_path, report(rows=rows, predicted=None, measured=None))
    assert "2 training losses were not finite and are left out." in Page(tmp_path / "report.html").text


def test_metrics_of_validation_are_drawn_each_in_its_panel(tmp_path):
    rows = rows_of()
    for row in rows[::50]:
        row |= {"val_accuracy": 1 - math.exp(-row["step"] / 100), "val_cross_entropy": 2 + row["val_loss"]}
    rows[100]["val_accuracy"] = rows[150]["val_nothing"] = math.nan
    assert loss_curve.metric_names(rows) == ["accuracy", "cross_entropy", "nothing"]
    figure = loss_curve.draw_metrics(rows, ["accuracy", "cross_entropy", "nothing"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["accuracy", "cross_entropy", "nothing"]
    drawn = [list(map(tuple, axes.lines[0].get_xydata().tolist())) for axes in figure.axes]
    assert drawn[0] == [(row["step"], row["val_accuracy"]) for row in rows[::50] if row["step"] != 100]
    assert drawn[1] == [(row["step"], row["val_cross_entropy"]) for row in rows[::50]]
    assert drawn[2] == []
    assert [text.get_text() for text in figure.axes[0].texts] == [f"{rows[250]['val_accuracy']:.4g}"]
    write_report(tmp_path, report(rows=rows, predicted=None, measured=None))
    assert written(tmp_path) == {"loss.png", "metrics.png", "report.html"}
    page = Page(tmp_path / "report.html")
    images = [base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) for image in page.all("img")]
    assert images == [(tmp_path / name).read_bytes() for name in ("loss.png", "metrics.png")]
    assert "accuracy: from 0 to 0.9179. cross_entropy: from 7.6 to 4.093." in page.all("img")[1]["alt"]
    assert "accuracy, validation0 → 0.9179" in page.text
    assert "1 value was not finite and left out. 1 metric more is in metrics.jsonl." in page.text


def test_a_run_may_have_one_metric_none_that_is_finite_or_many(tmp_path):
    rows = [{"step": 3, "loss": 1.5, "val_loss": 2.0, "val_top5": 0.5}]
    write_report(tmp_path, report(rows=rows, predicted=None, measured=None))
    assert "top5, validation0.5" in Page(tmp_path / "report.html").text
    write_report(tmp_path, report(rows=[rows[0] | {"val_top5": math.inf}], predicted=None, measured=None))
    assert "No metric of this run has a finite value." in Page(tmp_path / "report.html").text
    names = [f"m{i}" for i in range(100)]
    assert report_module._metrics_to_draw(report(rows=[rows[0] | {f"val_{name}": 1.0 for name in names}])) == ["top5", *names[:23]]
    (axes,) = loss_curve.draw_metrics([{"step": 0, "val_" + "n" * 64: 1.0}], ["n" * 64]).axes
    assert len(axes.get_title(loc="left")) == 32


@pytest.mark.parametrize("rows", [[{"step": 3, "loss": 1.5}], [{"step": 3, "loss": 1.5, "val_loss": 2.0}], rows_of(20)], ids=len)
def test_a_short_run_has_a_curve_too(tmp_path, rows):
    lines = lines_of(rows)
    assert lines["each batch"] == [(row["step"], row["loss"]) for row in rows]
    assert "running mean" not in lines
    write_report(tmp_path, report(rows=rows, predicted=None, measured=None))
    assert written(tmp_path) == {"loss.png", "report.html"}


def test_a_run_of_hundreds_of_thousands_of_steps_is_thinned_and_no_peak_is_lost():
    rows = [{"step": step, "loss": 2.0 + step % 7} for step in range(300_000)]
    rows[123_456]["loss"], rows[200_001]["loss"] = 50.0, 0.5
    lines = lines_of(rows)
    assert len(lines["each batch"]) <= 2001
    assert {(123_456, 50.0), (200_001, 0.5), (299_999, rows[-1]["loss"])} <= set(lines["each batch"])
    assert len(lines["running mean"]) <= 2001


# In a browser ----------------------------------------------------------------------------------------------------------------


def test_a_browser_shows_the_page(folder):
    seen = browser.inspect(folder / "report.html", width=390)
    assert len(seen["images"]) == 3
    assert all(loaded and pixels > 500 for loaded, pixels in seen["images"])
    for words in ("A run", "Predicted against measured", "Timeline", "Memory", "held memory, rank 2", "pipedream_2bw, 3 stages"):
        assert words in seen["text"]
    assert seen["needs_width"] <= 390  # a phone: only the wide pictures scroll, each by itself
    assert [name for name in seen["requests"] if not name.startswith("data:")] == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_paints_the_page(folder, tmp_path, dark):
    browser.screenshot(folder / "report.html", tmp_path / "page.png", dark=dark)
    pixels = matplotlib.image.imread(tmp_path / "page.png")[:, :, :3]
    paper = pixels[0, 0]
    assert (paper.mean() < 0.2) == dark
    assert (np.abs(pixels - paper).max(axis=2) > 0.1).mean() > 0.05
    if not dark:  # the blue of the forwards
        assert (np.abs(pixels - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.02).sum() > 1000


def test_the_page_could_not_reach_the_network_if_it_tried(folder, tmp_path):
    page = (folder / "report.html").read_text()
    with browser.listener() as (address, requests):
        tries = f'<img src="{address}/image"><link rel="stylesheet" href="{address}/style"><script src="{address}/script"></script></main>'
        (tmp_path / "tries.html").write_text(page.replace("</main>", tries))
        browser.inspect(tmp_path / "tries.html")
        assert requests == []
        (tmp_path / "open.html").write_text(f"<main>{tries}")  # without the policy it would
        browser.inspect(tmp_path / "open.html")
        assert sorted(requests) == ["/image", "/script", "/style"]


def slowed_window(plan, slow, costs):
    """Return a window in which some ranks take longer for each computation than the costs say."""
    run = jpipe.simulate(jpipe.lower(plan, batches=6), costs)
    window = jpipe.programs.extract_window(run.timeline, run.memory, plan.microbatches, first=2, batches=3)
    rows = [
        tuple(span._replace(end=span.start + slow.get(rank, 1.0) * (span.end - span.start)) for span in row)
        for rank, row in enumerate(window.timeline)
    ]
    return dataclasses.replace(window, timeline=tuple(rows))


@pytest.mark.parametrize(
    ("replicas", "predicted", "slow", "found"),
    [
        (1, True, {2: 1.4}, {2: 1.4}),
        (1, True, {2: 1.1}, {}),
        (1, True, {}, {}),
        (1, False, {2: 1.4}, {}),  # nothing says how long this stage should take
        (2, False, {3: 1.4}, {3: 1.4}),
        (2, True, {0: 1.5, 1: 1.5}, {0: 1.5, 1: 1.5}),
    ],
)
def test_slow_ranks_are_those_that_take_longer_for_the_same_work(replicas, predicted, slow, found):
    plan = jpipe.Plan.even("abcd", num_stages=3, schedule="pipedream_2bw", microbatches=6, replicas=replicas)
    costs = [jpipe.programs.StageCost(forward=0.01 * n, backward=0.02 * n, update=0.003) for n in (4, 2, 1)]
    if predicted:
        stage_seconds = [5 * (cost.forward + cost.backward) for cost in costs]  # all are five times as fast as planned
        prediction = jpipe.plan.Predicted(batch_seconds=1.0, bubble=0.0, peak_bytes=[1, 1, 1], stage_seconds=stage_seconds)
        plan = plan.model_copy(update={"predicted": prediction})
    result = slow_ranks(plan, slowed_window(plan, slow, costs))
    assert result == pytest.approx(found, rel=1e-6)
    words = slow_words(result, [(rank,) for rank in range(len(plan.rank_workers))], [0] * len(plan.rank_workers))
    assert ("differing: [{devices: [3], speed: 0.71}]" in words) == (3 in found)
    assert bool(words) == bool(found)


@pytest.mark.parametrize(("scale", "found"), [(1.0, {1: 2.0}), (0.5, {})])
def test_ranks_that_compute_less_than_two_milliseconds_are_left_out(scale, found):
    """Half as fast, one of two replicas takes over 2 ms, and the other one less."""
    plan = jpipe.Plan.even("ab", 1, microbatches=6, replicas=2)
    costs = [jpipe.programs.StageCost(forward=0.001 * scale, backward=0.002 * scale, update=0.003)]
    assert slow_ranks(plan, slowed_window(plan, {1: 2.0}, costs)) == pytest.approx(found, rel=1e-6)


def test_a_slow_rank_is_named_with_the_number_of_its_device():
    stack = jpipe.LayerStack({"a": jnp.negative})
    plan = jpipe.Plan.even(stack.ids, 1, microbatches=6, replicas=2).model_copy(update={"placement": ((3, 1),)})
    pipe = jpipe.Pipeline(stack, plan, lambda y, labels: (y.sum(), y.sum()), optax.identity())
    measured = slowed_window(plan, {1: 2.0}, [jpipe.programs.StageCost(forward=0.01, backward=0.02, update=0.003)])
    assert "differing: [{devices: [1], speed: 0.50}]" in slow_of(pipe, measured)
    assert slow_of(pipe, None) == ""


def test_slow_ranks_of_several_processes_are_named_and_shared_devices_are_not():
    assert slow_words({1: 1.5}, [(0,), (1,)], [0, 1]).startswith("Rank 1 (process 1) computes 1.50 times as long as the others")
    assert slow_words({1: 1.5}, [(0,), (0,)], [0, 0]) == ""
    words = slow_words({0: 1.25, 2: 2.0}, [(0, 1), (2, 3), (4, 5)], [0, 0, 0])
    assert "Ranks 0, 2 compute 1.25, 2.00 times as long" in words
    assert "differing: [{devices: [0, 1], speed: 0.80}, {devices: [4, 5], speed: 0.50}]" in words
    assert "Slow rank." in report_module._comparison_table(report(slow="Slow rank."))
