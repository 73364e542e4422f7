"""Pictures: boxes and areas match the data, labels stay inside their boxes, and files are reproducible."""

import io
import itertools
import subprocess
import sys

import matplotlib.colors
import matplotlib.text
import numpy as np
import pytest

import jpipe
from jpipe.programs import MemorySample, Span

FORWARD, BACKWARD, INPUT, WEIGHT = "#0072b2", "#f0a830", "#f2d06b", "#df6722"
UPDATE, IDLE = "#1a1a1a", "#efefef"


def predict(
    schedule: str, depth: int = 4, microbatches: int = 4, batches: int = 3, chunks: int | None = None, **costs: float
) -> jpipe.programs.Prediction:
    plan = plan_of(schedule, depth, microbatches, chunks_per_rank=chunks)
    return jpipe.simulate(jpipe.lower(plan, batches), [jpipe.programs.StageCost(**costs)] * depth)


def plan_of(schedule: str, depth: int, microbatches: int, **options) -> jpipe.Plan:
    return jpipe.Plan.even([f"layer_{i}" for i in range(depth)], depth, schedule, microbatches, **options)


def boxes(axes, colour: str) -> list[list[tuple[float, float]]]:
    """Return (left, right) of all boxes of a colour, for each row from the top that has such a box."""
    rows = boxes_by_row(axes, colour)
    return [rows[w] for w in sorted(rows)]


def boxes_by_row(axes, colour: str) -> dict[int, list[tuple[float, float]]]:
    rows: dict[int, list[tuple[float, float]]] = {}
    for collection in axes.collections:
        if matplotlib.colors.to_hex(collection.get_facecolor()[0]) == colour:
            for path in collection.get_paths():
                (left, top), (right, bottom) = path.vertices.min(0), path.vertices.max(0)
                assert int(top) == int(bottom)
                row = rows.setdefault(int(top), [])
                if right > left:
                    row.append((left, right))
    return rows


def drawn(figure) -> None:
    figure.savefig(io.BytesIO(), format="png")


def test_each_computation_is_a_box_of_its_colour_at_its_place_and_a_fused_one_is_cut_at_a_third():
    prediction = predict("pipedream_2bw", update=0.5)
    (axes,) = jpipe.draw_timeline({"predicted": prediction.timeline}).axes
    expected: dict[str, list] = {colour: [[] for _ in prediction.timeline] for colour in (FORWARD, BACKWARD, UPDATE)}
    for w, spans in enumerate(prediction.timeline):
        for span in spans:
            turn = {"F": span.end, "B": span.start, "FB": span.start + 1}[span.op]  # a forward takes 1, a backward 2
            expected[FORWARD][w] += [(span.start, turn)] if turn > span.start else []
            expected[BACKWARD][w] += [(turn, span.end)] if span.end > turn else []
            expected[UPDATE][w] += [(span.end, span.end + 0.5)] if span.updates else []
    for colour, rows in expected.items():
        for box, row in zip(boxes(axes, colour), rows, strict=True):
            np.testing.assert_allclose(box, row)
    assert boxes(axes, IDLE) == [[(0, prediction.seconds)]] * 4
    assert axes.get_title(loc="left").endswith(f"bubble {prediction.bubble:.1%}")
    assert axes.yaxis_inverted()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_halves_of_backwards_have_their_colours_and_a_fused_forward_is_cut_in_the_middle():
    prediction = predict("zb_h1")
    (axes,) = jpipe.draw_timeline({"predicted": prediction.timeline}).axes
    expected: dict[str, list] = {colour: [[] for _ in prediction.timeline] for colour in (FORWARD, BACKWARD, INPUT, WEIGHT)}
    for rank, spans in enumerate(prediction.timeline):
        for span in spans:
            colour = {"F": FORWARD, "FI": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}[span.op]
            turn = span.start + 1 if span.op == "FI" else span.end
            expected[colour][rank].append((span.start, turn))
            if span.op == "FI":
                expected[INPUT][rank].append((turn, span.end))
    assert {span.op for spans in prediction.timeline for span in spans} == {"F", "B", "I", "W", "FI"}
    for colour, rows in expected.items():
        assert [row for row in boxes(axes, colour) if row] == [row for row in rows if row]


def test_chunks_are_separated_by_lines_and_numbered():
    spans = (Span("F", 0, 0, 0.0, 1.0), Span("F", 0, 0, 1.0, 2.0, chunk=1), Span("B", 12, 0, 2.0, 4.0, chunk=2))
    figure = jpipe.draw_timeline({"measured": (spans,)}, unit="forwards")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.0", "0.0¹", "12.0²"]
    assert figure.axes[0].get_xlabel().endswith("in a box: microbatch.version of its weights; the small number, and the lines: its chunk")
    assert boxes(figure.axes[0], "#ffffff") == [[(1, 2), (2, 4), (2, 4)]]
    thin = tuple(span._replace(start=span.start + n, end=span.end + n) for n in range(0, 4000, 4) for span in spans)
    figure = jpipe.draw_timeline({"measured": (thin,)}, unit="forwards")
    assert figure.axes[0].get_xlabel() == "time (forwards);  lines in a box: its chunk"
    alone = jpipe.draw_timeline({"measured": (spans[:1],)})
    assert "chunk" not in alone.axes[0].get_xlabel()


def test_the_legend_lists_the_drawn_computations():
    def legend(timeline) -> list[str]:
        (drawn,) = jpipe.draw_timeline({"a": timeline}).legends
        return [text.get_text() for text in drawn.get_texts()]

    assert legend(predict("zb_h1").timeline) == ["forward", "backward", "backward for inputs", "backward for weights", "update", "idle"]
    assert legend(predict("pipedream").timeline) == ["forward", "backward", "update", "idle"]
    assert legend(((Span("F", 0, 0, 0.0, 1.0), Span("B", 0, 0, 1.0, 3.0)),)) == ["forward", "backward"]


def test_colours_differ_in_grey():
    colours = (UPDATE, FORWARD, WEIGHT, BACKWARD, INPUT, IDLE)
    greys = [np.dot(matplotlib.colors.to_rgb(colour), (0.299, 0.587, 0.114)) for colour in colours]
    assert all(darker + 0.1 < lighter for darker, lighter in itertools.pairwise(greys))


def test_an_update_that_takes_no_time_is_a_mark_at_the_end_of_its_span():
    spans = (Span("F", 0, 0, 0.0, 1.0), Span("B", 0, 0, 1.0, 3.0, True), Span("F", 1, 1, 3.0, 4.0))
    (axes,) = jpipe.draw_timeline({"measured": (spans,)}).axes
    (((left, right),),) = boxes(axes, UPDATE)
    assert 2.5 <= left < right == 3.0


def test_panels_share_the_axis_and_are_headed_by_length_and_bubble():
    fast, slow = predict("pipedream_2bw"), predict("gpipe")
    figure = jpipe.draw_timeline({"predicted": fast.timeline, "measured": slow.timeline}, unit="forwards", title="Two")
    headings = [axes.get_title(loc="left") for axes in figure.axes]
    assert headings == [f"predicted: 45 forwards, bubble {fast.bubble:.1%}", f"measured: 63 forwards, bubble {slow.bubble:.1%}"]
    assert [axes.get_xlim() for axes in figure.axes] == [(0, 63), (0, 63)]
    assert [boxes(axes, IDLE)[0] for axes in figure.axes] == [[(0, 45)], [(0, 63)]]
    assert "Two" in [text.get_text() for text in figure.texts]


def test_a_window_has_the_requested_length():
    prediction = predict("gpipe")
    window = jpipe.programs.extract_window(prediction.timeline, prediction.memory, 4, 0, 1)
    cut_short = tuple(spans[:-1] for spans in window.timeline)
    figure = jpipe.draw_timeline({"window": cut_short}, seconds=window.seconds, unit="forwards")
    busy = sum(span.end - span.start for spans in cut_short for span in spans)
    assert figure.axes[0].get_title(loc="left") == f"window: 21 forwards, bubble {1 - busy / (21 * 4):.1%}"


@pytest.mark.parametrize(("forward", "label"), [(2.0, "time (s)"), (2e-3, "time (ms)"), (2e-6, "time (µs)")])
def test_seconds_are_written_in_a_unit_of_their_size(forward, label):
    timeline = ((Span("F", 0, 0, 0.0, forward),),)
    figure = jpipe.draw_timeline({"measured": timeline})
    drawn(figure)
    assert figure.axes[0].get_xlabel().startswith(label)
    assert figure.axes[0].get_title(loc="left").startswith("measured: 2 ")
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()][-1] == "2"


@pytest.mark.thinned(most=5)
@pytest.mark.parametrize("schedule", sorted({*jpipe.schedules.SCHEDULES} - {"auto_zero_bubble"}))
@pytest.mark.parametrize(("depth", "microbatches", "batches"), [(1, 1, 1), (2, 4, 2), (4, 4, 3), (4, 8, 2), (16, 32, 1)])
def test_labels_stand_inside_their_box_and_never_on_each_other(schedule, depth, microbatches, batches):
    chunks = 2 if jpipe.schedules.SCHEDULES[schedule].layout != "straight" else 1
    depth, microbatches = depth * chunks, max(microbatches, depth * chunks if chunks > 1 else 1)
    timeline = predict(schedule, depth, microbatches, batches, chunks).timeline
    figure = jpipe.draw_timeline({"a": timeline, "b": timeline}, title=schedule)
    drawn(figure)
    for axes in figure.axes:
        rows = [boxes_by_row(axes, colour) for colour in (FORWARD, BACKWARD, INPUT, WEIGHT)]
        by_row: dict[int, list] = {}
        for text in axes.texts:
            extent = text.get_window_extent().transformed(axes.transData.inverted())
            row = int(text.get_position()[1])
            assert any(left <= extent.x0 and extent.x1 <= right for row_boxes in rows for left, right in row_boxes.get(row, [])), text
            by_row.setdefault(row, []).append((extent.x0, extent.x1))
        for extents in by_row.values():
            assert all(a[1] < b[0] for a, b in itertools.pairwise(sorted(extents)))


def test_labels_name_microbatch_and_version_where_there_is_room_for_all_and_nothing_where_there_is_none():
    def labels(batches: int) -> list[str]:
        (axes,) = jpipe.draw_timeline({"": predict("pipedream_2bw", 2, 4, batches).timeline}).axes
        return [text.get_text() for text in axes.texts if int(text.get_position()[1]) == 0]

    spans = predict("pipedream_2bw", 2, 4, 3).timeline[0]
    assert labels(3) == [f"{span.microbatch}.{span.version}" for span in spans]
    middle = labels(6)
    assert {"0", "23"} <= set(middle)
    assert not any("." in label for label in middle)
    assert labels(60) == []


def test_no_number_stands_in_a_single_box_that_has_room_for_it():
    spans = tuple(Span("F", k, 0, 0.1 * k, 0.1 * k + 0.09) for k in range(100, 160))
    (axes,) = jpipe.draw_timeline({"": ((*spans, Span("F", 160, 0, 16.0, 18.0)),)}, width=5.0).axes
    assert not axes.texts
    assert "in a box" not in axes.get_xlabel()


def sample(time: float, weights: dict[int, int], residuals: int = 0, other: int = 0) -> MemorySample:
    return MemorySample(time, weights, 5_000_000, 1_000_000, residuals, other)


def test_memory_is_stacked_in_steps_a_shade_a_version():
    samples = (
        sample(0.0, {0: 2_000_000}),
        sample(1.0, {0: 2_000_000, 1: 2_000_000}, residuals=3_000_000),
        sample(2.0, {1: 2_000_000}, other=500_000),
    )
    (axes,) = jpipe.draw_memory({"measured": (samples,)}, seconds=4.0).axes

    def stack_at(time: float) -> list[tuple[str, float]]:
        stacked = []
        (areas,) = axes.collections
        for path, colour in zip(areas.get_paths(), areas.get_facecolor(), strict=True):
            inside = [y for y in np.arange(0.25e6, 14e6, 0.5e6) if path.contains_point((time, y))]
            if inside:
                stacked.append((matplotlib.colors.to_hex(colour), len(inside) / 2))
        return stacked

    zero, one = "#08519c", "#6baed6"
    common = [("#009e73", 5), ("#f0a830", 1)]
    assert stack_at(0.9) == [(zero, 2), *common]
    assert stack_at(1.5) == [(zero, 2), (one, 2), *common, ("#cc79a7", 3)]
    assert stack_at(3.9) == [(one, 2), *common, ("#8c8c8c", 0.5)]
    assert [text.get_text() for text in axes.texts] == ["at most 13 MB"]


def test_memory_has_a_row_a_rank_a_column_an_entry_and_one_scale():
    memory = ((sample(0.0, {0: 2_000}),), (sample(0.0, {0: 3_000_000_000}),))
    figure = jpipe.draw_memory({"predicted": memory, "measured": memory}, seconds={"predicted": 1.0, "measured": 2.0})
    drawn(figure)
    assert len(figure.axes) == 4
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}) == 1
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["predicted", "measured"]
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["rank 0", "rank 1"]
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["at most 6 MB"] * 2 + ["at most 3.01 GB"] * 2
    assert all(axes.get_ylim()[1] > sample(0.0, {0: 3_000_000_000}).total for axes in figure.axes)


@pytest.mark.parametrize(
    ("plan", "names", "note"),
    [
        (plan_of("pipedream", 2, 2, replicas=(2, 1)), ["0·0", "0·1", "1·0"], "stage·replica"),
        (plan_of("interleaved_1f1b", 4, 2, chunks_per_rank=2), ["0, 2", "1, 3"], "its stages"),
        (plan_of("zb_v", 4, 2, replicas=2), ["0, 3·0", "0, 3·1", "1, 2·0", "1, 2·1"], "its stages·replica"),
    ],
)
def test_where_ranks_have_replicas_or_several_stages_each_row_is_labelled(plan, names, note):
    prediction = jpipe.simulate(jpipe.lower(plan, 3))
    timeline = jpipe.draw_timeline({"a": prediction.timeline, "b": prediction.timeline}, plan=plan)
    memory = jpipe.draw_memory({"a": prediction.memory}, seconds=prediction.seconds, plan=plan)
    drawn(timeline), drawn(memory)
    for axes in timeline.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank}: {name}" for rank, name in enumerate(names)]
    assert [axes.get_ylabel() for axes in memory.axes] == [f"rank {rank}\n{name}" for rank, name in enumerate(names)]
    assert all(figure.axes[-1].get_xlabel().endswith(f";  beside a rank: {note}") for figure in (timeline, memory))
    for figure in timeline, memory:
        for axes in figure.axes:
            assert axes.get_tightbbox().x0 >= 0  # nothing is cut off


def test_ranks_of_one_stage_each_have_their_names_alone():
    plan = plan_of("pipedream", 2, 2)
    alone = jpipe.draw_timeline({"a": jpipe.simulate(jpipe.lower(plan, 1)).timeline}, plan=plan)
    assert [label.get_text() for label in alone.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]


def test_the_same_data_gives_the_same_file():
    prediction = predict("pipedream")

    def files() -> list[bytes]:
        figures = jpipe.draw_timeline({"a": prediction.timeline}), jpipe.draw_memory({"a": prediction.memory}, seconds=prediction.seconds)
        images = [io.BytesIO() for _ in figures]
        for figure, image in zip(figures, images, strict=True):
            figure.savefig(image, format="png")
        return [image.getvalue() for image in images]

    assert files() == files()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: jpipe.draw_timeline({}), "draw_timeline: expected at least one entry, each with at least one rank, found none; give some"),
        (lambda: jpipe.draw_timeline({"measured": ()}), r"with at least one rank, found \['measured'\]; give some"),
        (
            lambda: jpipe.draw_timeline({"measured": ((), ())}),
            "expected a duration above 0 for 'measured', found 0.0; check its times, or `seconds`",
        ),
        (
            lambda: jpipe.draw_timeline({"a": ((Span("F", 0, 0, 0.0, 1.0),),)}, plan=plan_of("gpipe", 2, 2)),
            "draw_timeline: plan: expected 1 rank, one for each row, found 2; give the plan that ran",
        ),
        (lambda: jpipe.draw_memory({}, seconds=1.0), "draw_memory: expected at least one entry"),
        (lambda: jpipe.draw_memory({"a": ((),)}, seconds={"b": 1.0}), "draw_memory: expected a duration above 0 for 'a', found 0.0"),
        (lambda: jpipe.draw_memory({"a": ((),)}, seconds=float("inf")), "expected a duration above 0 for 'a', found inf"),
    ],
)
def test_nothing_to_draw_is_refused(draw, message):
    with pytest.raises(jpipe.InputError, match=message):
        draw()


def test_ranks_without_spans_or_samples_are_empty_rows():
    drawn(jpipe.draw_timeline({"measured": ((), (Span("F", 0, 0, 0.0, 1.0),))}))
    drawn(jpipe.draw_memory({"measured": ((), (sample(0.0, {}),))}, seconds=1.0))


def test_importing_the_library_does_not_import_matplotlib():
    subprocess.run([sys.executable, "-c", "import jpipe, sys; assert 'matplotlib' not in sys.modules"], check=True)


def smallest_text(figure) -> float:
    drawn(figure)
    return min(text.get_fontsize() for text in figure.findobj(matplotlib.text.Text) if text.get_text())


def fits_into_the_figure(figure) -> bool:
    drawn(figure)
    box = figure.get_tightbbox()
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.get_figwidth() and box.y1 <= figure.get_figheight()


@pytest.mark.slow
def test_a_narrow_picture_has_large_text_and_nothing_outside():
    prediction = predict("zb_h1", microbatches=8, chunks=None)
    timelines, seconds = {"predicted": prediction.timeline, "measured": prediction.timeline}, prediction.seconds
    narrow = jpipe.draw_timeline(timelines, unit="forwards", width=5.4, font_size=11)
    assert smallest_text(narrow) == 11
    assert fits_into_the_figure(narrow)
    memory = jpipe.draw_memory(dict.fromkeys(timelines, prediction.memory), seconds=seconds, width=5.4, font_size=11)
    assert smallest_text(memory) == 11
    assert fits_into_the_figure(memory)
    usual = jpipe.draw_timeline(timelines, unit="forwards")
    assert smallest_text(usual) == 6.5
    assert len(narrow.axes[0].texts) < len(usual.axes[0].texts)  # only labels that fit into their boxes


def test_lines_that_mark_chunks_are_explained_where_numbers_do_not_fit():
    spans = (Span("F", 0, 0, 0.0, 1.0), Span("F", 0, 0, 1.0, 1.1, chunk=1), Span("B", 0, 0, 2.0, 4.0))
    figure = jpipe.draw_timeline({"measured": (spans,)}, unit="forwards", width=3.0)
    assert figure.axes[0].get_xlabel().replace("\n", " ").endswith("; the lines: its chunk")


def test_transfers_and_sums_are_boxes_in_rows_below_the_ranks():
    plan = jpipe.Plan.even("ab", 2, "pipedream_2bw", 4, replicas=[2, 1])
    costs = [jpipe.programs.StageCost(outputs=1000, accumulators=500), jpipe.programs.StageCost(gradient=1000)]
    prediction = jpipe.simulate(jpipe.lower(plan, 2), costs, jpipe.Link(bandwidth=1000, latency=0.1))
    figure = jpipe.draw_timeline({"a": prediction.timeline, "b": prediction.timeline}, {"b": prediction.transfers}, unit="forwards")
    without, axes = figure.axes
    rows = [text.get_text() for text in axes.get_yticklabels()]
    assert rows == ["rank 0", "rank 1", "rank 2", "0 to 2", "1 to 2", "2 to 0", "2 to 1", "sum 0,1"]
    assert [text.get_text() for text in without.get_yticklabels()] == rows[:3]
    for what, colour in (("activation", "#7fc4ea"), ("gradient", "#d9a3c1"), ("sum", "#009e73")):
        expected: dict[int, list] = {}
        for transfer in sorted(prediction.transfers, key=lambda transfer: transfer.start):
            if transfer.what == what:
                expected.setdefault(rows.index(transfer.row), []).append((transfer.start, transfer.end))
        found = boxes_by_row(axes, colour)
        assert sorted(found) == sorted(expected)
        assert all(np.allclose(found[row], expected[row]) for row in expected)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-3:] == ["activation sent", "gradient sent", "sum over replicas"]
    drawn(figure)


@pytest.mark.parametrize(
    ("fields", "colour", "boxes", "name"),
    [
        ({"replicas": 2, "agree": {"every": 1}}, "#4b1d78", [2], "agreement of pipelines"),
        ({"offload": {"optimizer": "all"}}, "#f0e0a0", [2, 2], "move to or from host memory"),
    ],
)
def test_agreements_and_moves_have_a_colour_and_a_name_of_their_own(fields, colour, boxes, name):
    plan, link = jpipe.Plan.even("ab", 1, "gpipe", 2, **fields), jpipe.Link(bandwidth=10)
    costs = [jpipe.programs.StageCost(accumulators=5, weights=5, optimizer=5)]
    prediction = jpipe.simulate(jpipe.lower(plan, 2), costs, link, host=link)
    figure = jpipe.draw_timeline({"a": prediction.timeline}, {"a": prediction.transfers}, unit="forwards")
    assert [len(row) for row in boxes_by_row(figure.axes[0], colour).values()] == boxes
    assert figure.legends[0].get_texts()[-1].get_text() == name


def test_transfers_of_a_timeline_that_there_is_not_are_refused():
    timeline = ((Span("F", 0, 0, 0.0, 1.0),),)
    with pytest.raises(jpipe.InputError, match=r"draw_timeline: transfers: expected a mapping of names of timelines \('a'\), found "):
        jpipe.draw_timeline({"a": timeline}, {"b": ()})
