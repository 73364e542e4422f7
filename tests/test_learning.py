"""The study of delayed gradients: its emulation equals the pipeline, and a prediction helps where it should."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.learning import __main__ as learning
from benchmarks.learning import changes, grid, links, report
from benchmarks.learning import emulation as emulations
from benchmarks.learning.emulation import Emulation, warm_up_and_cosine
from benchmarks.learning.grid import OPTIMIZERS, Row, Variant
from docs import charts
from jpipe import Layer, LayerStack, Pipeline, Plan
from jpipe.optimizers import compensated_adamw, scale_by_delay
from tests.jpipe import models, running

ROOT = Path(__file__).parents[1]
D, UPDATES, RATE, CLIP, SLOW_UPDATES = 4, 7, 0.05, 0.3, 5
STACK = models.plain_stack(D)
SCHEDULE = warm_up_and_cosine(20)
PLANS = {
    "flush": ("pipedream_flush", D, {}),
    "2BW": ("pipedream_2bw", D, {}),
    "PipeDream m = 1": ("pipedream", 1, {}),
    "PipeDream m = d": ("pipedream", D, {}),
    "PipeDream m = 2d": ("pipedream", 2 * D, {}),
    "vertical sync m = 1": ("pipedream", 1, {"vertical_sync": True}),
    "vertical sync m = d": ("pipedream", D, {"vertical_sync": True}),
    "vertical sync m = 2d": ("pipedream", 2 * D, {"vertical_sync": True}),
}


@pytest.fixture(autouse=True)
def promotion():
    """Allow standard promotion, which optax needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def emulated(variant, batches, start, optimizer="Adam", rate=RATE, clip=CLIP, schedule=SCHEDULE, momentum=0.9, backward="stashed"):
    """Return the result of an emulation that evaluates the first batch after every update."""
    precise = np.asarray(batches[0][0]).dtype.type
    momentum = momentum if variant.momentum is None else variant.momentum
    recipe = variant.recipe(0, rate, momentum, D, 2 * D)
    recipe = recipe._replace(rate=precise(rate), momentum=precise(momentum))
    data = jax.tree.map(lambda *leaves: np.stack(leaves)[:, None], *batches)
    stages = [(layer_id,) for layer_id in STACK.ids]
    emulation = Emulation(STACK, stages, models.squares, OPTIMIZERS[optimizer].rule, schedule, SLOW_UPDATES, D, clip, backward)
    return jax.jit(emulation.train)(recipe, start, data, batches[0])


def initial(batch):
    return {layer_id: STACK.init_layer(layer_id, jax.random.key(0), batch[0])[0] for layer_id in STACK.ids}


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("schedule", "prediction", "slow", "backward"),
    [
        *((schedule, 1.0, False, "stashed") for schedule in PLANS),
        ("2BW", 0.0, False, "stashed"),
        ("PipeDream m = 1", 0.5, True, "stashed"),
        *((f"PipeDream m = {m}", 1.0, False, backward) for m in ("d", "2d") for backward in ("newest", "recomputed")),
    ],
)
def test_the_emulation_equals_the_pipeline(schedule, prediction, slow, backward):
    """In float64, with spike compensation, clipping, and a learning rate that changes."""
    with jax.enable_x64(True):
        name, m, fields = PLANS[schedule]
        if backward != "stashed":
            fields = fields | {"stash": False, "recompute": "full" if backward == "recomputed" else "none"}
        optimizer = compensated_adamw(lambda t: RATE * SCHEDULE(t), b2=grid.ADAM_B2, weight_decay=grid.WEIGHT_DECAY)
        optimizer = optax.chain(optimizer, scale_by_delay(SLOW_UPDATES)) if slow else optimizer
        clip = {"clip_stage_norm" if schedule.startswith("PipeDream") else "clip_global_norm": CLIP}
        pipe = Pipeline(
            STACK,
            Plan.even(STACK.ids, D, name, m, **fields),
            models.squares,
            optimizer,
            jax.devices()[:D],
            delay_correction=prediction or None,
            **clip,
        )
        batches = models.batches_of(UPDATES, 2 * D, dtype=np.float64)
        state = running.fresh(pipe, batches)
        start = jax.tree.map(np.array, models.on_first_device(pipe.params(state)))  # the steps consume the state
        for batch in batches:
            state, _ = pipe.step(state, batch)
        state = pipe.drain(state)
        result = emulated(Variant(schedule, "delay", prediction, slow=slow), batches, start, backward=backward)
        running.check_close(models.on_first_device(pipe.params(state)), jax.tree.map(jnp.subtract, result.params, result.ahead))
        for worker in state.workers:
            newest = models.on_first_device(worker.weights.read(worker.weights.newest))
            running.check_close(newest, {layer_id: result.params[layer_id] for layer_id in newest})


@pytest.mark.exhaustive
def test_without_a_factor_the_prediction_changes_no_bit(monkeypatch):
    batches = models.batches_of(UPDATES, 2 * D)
    predicted = emulated(Variant("2BW"), batches, initial(batches[0]))

    zeros = emulations.predict_delay().init

    def identity():
        return optax.GradientTransformationExtraArgs(zeros, lambda updates, state, params=None, **_: (updates, state))

    monkeypatch.setattr(emulations, "predict_delay", identity, raising=True)
    plain = emulated(Variant("2BW"), batches, initial(batches[0]))
    jax.tree.map(np.testing.assert_array_equal, predicted, plain)


def last_loss(prediction, rate, momentum):
    """Return the loss after 80 updates of a quadratic with curvature 1 and a delay of one update; it is 1 at first."""
    linear = Layer(lambda key, x: ({"w": jnp.ones((3, 3))}, {}), lambda params, state, x, key, train: (x @ params["w"], state))
    inputs = np.sqrt(4.5) * np.eye(3, dtype=np.float32)
    batch = inputs, np.zeros((3, 3), np.float32)
    rule = OPTIMIZERS["SGD"].rule
    emulation = Emulation(LayerStack({"linear": linear}), [("linear",)], models.squares, rule, lambda t: 1.0, 1, 2, None)
    recipe = Variant("2BW", prediction=prediction).recipe(0, rate, momentum, 1, 1)
    data = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (1, 80, *leaf.shape)), batch)
    (loss,) = jax.jit(emulation.train)(recipe, {"linear": {"w": jnp.ones((3, 3))}}, data, batch).losses
    return float(loss) / 4.5


def test_a_prediction_stabilizes_delayed_gradients_with_momentum_only():
    """The largest stable steps are 0.1 and with a prediction 0.27 with momentum 0.9, and 1 and with a prediction 0.62 without momentum."""
    assert last_loss(1.0, 0.2, 0.9) < 0.1 < 10 < last_loss(0.0, 0.2, 0.9)
    assert last_loss(0.0, 0.8, 0.0) < 0.1 < 10 < last_loss(1.0, 0.8, 0.0)


ROWS = [
    Row("GPT", 4, "Adam", schedule, remedy, rate, seed, 10, [loss + bias for loss in losses])
    for schedule, remedy, rate, losses in (
        ("flush", "none", 1e-3, [4.0, 3.0, 2.0, 1.5, 1.0]),
        ("flush", "none", 1e-2, [4.0, 3.0, 2.0, 2.0, 2.0]),
        ("2BW", "none", 1e-3, [4.0, 3.5, 3.0, 2.5, 2.0]),
        ("2BW", "prediction", 1e-3, [4.0, 3.0, 2.5, 2.0, 1.5]),
        ("2BW", "momentum 0", 1e-3, [4.0, np.nan, np.nan, np.nan, np.nan]),
    )
    for seed, bias in enumerate((0.0, 0.1))
]


def test_recipes_are_compared_with_the_best_flush():
    recipes = report.best_recipes(ROWS, "GPT", 4, "Adam")
    flush, _, predicted, _ = recipes
    assert flush.rate == 1e-3
    assert report.best(recipes) == flush == report.best_flush(recipes)
    assert report.token_overhead(flush, flush) == pytest.approx(1)
    assert report.token_overhead(predicted, flush) == pytest.approx(50 / 40)


def test_lines_of_all_rates_compare_equal_seeds():
    """The best flush of seed 0 alone is another one than that of both seeds."""
    extra = [Row("GPT", 4, "Adam", schedule, "none", 1e-1, 0, 10, [loss]) for schedule, loss in (("flush", 0.5), ("2BW", 0.75))]
    table = report.table_by_rate([*ROWS, *extra], "GPT", 4, "Adam")
    of_flush = {row[2]: row[3:6] for row in table.rows if row[0] == "flush"}
    assert of_flush["0.001"] == ["2", "1.050", "–"]
    assert of_flush["0.01"][:2] == ["2", "2.050"]
    assert of_flush["0.1"] == ["1", "0.500", "–"]
    assert next(row[3:6] for row in table.rows if row[:3] == ["2BW", "none", "0.1"]) == ["1", "0.750", "+0.250"]
    assert next(row[5] for row in table.rows if row[1] == "prediction") == "+0.500 (+0.500 to +0.500)"


def test_optimizers_with_equal_seeds_share_a_table():
    muon = [dataclasses.replace(row, optimizer="Muon") for row in ROWS[:6]]
    soap = [Row("GPT", 4, "SOAP", "flush", "none", 1e-3, seed, 10, [1.0]) for seed in (0, 1, 2)]
    shared, by_rate = report.tables([*ROWS, *muon, *soap, dataclasses.replace(soap[0], rate=1e-2)])[::-1]
    assert (shared.name, shared.head) == ("GPT, 4 stages", ["schedule", "remedy", "Adam", "Muon"])
    assert shared.rows[:2] == [["flush", "none", "1.050", "1.050"], ["2BW", "none", "2.050 (+1.000, 1.67)", "2.050 (+1.000, 1.67)"]]
    assert shared.rows[-1] == ["2BW", "momentum 0", "diverged", ""]
    assert (by_rate.name, len(by_rate.rows)) == ("GPT, 4 stages, SOAP", 2)


def test_tables_of_a_cpu_have_their_own_places(tmp_path, capsys):
    results = tmp_path / "learning.json"
    results.write_text(json.dumps({"rows": [dataclasses.asdict(row) for row in ROWS], "machine": {"platform": "cpu"}}))
    learning.main(["--from-json", str(results)])
    assert "GPT, 4 stages, on a CPU\n\n| schedule | remedy | Adam |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["h100", "cpu"])
def test_the_tables_of_the_pages_are_those_of_the_results(name, capsys):
    learning.main(["--from-json", str(ROOT / "benchmarks" / "learning" / f"{name}.json")])
    tables = capsys.readouterr().out.strip().split("\n\n")
    pages = "".join(
        page.read_text() for page in sorted((ROOT / "docs" / "explanation").glob("learning*.md")) if page.stem != "learning-agree"
    )
    written = re.findall(rf"^<!-- ({learning.WRITTEN}.*) -->$", pages, re.MULTILINE)
    places = [place for place in written if place.endswith(", on a CPU") == (name == "cpu")]
    of_places = {place: table for place, table in zip(tables[::2], tables[1::2], strict=True) if place.startswith(learning.WRITTEN)}
    assert sorted(of_places) == sorted(places)
    for place, table in of_places.items():
        assert f"<!-- {place} -->\n\n{table}\n" in pages


def test_the_readme_compares_recipes_with_a_flush_that_has_the_same_optimizer():
    """How many times as many updates, as the smallest and the largest of both optimizers and of four and eight stages."""
    tables = [report.best_recipes(charts.results(), "GPT", d, optimizer) for d in (4, 8) for optimizer in ("Adam", "Muon")]

    def updates(schedule, remedy, remedy_of_flush):
        found = [{(recipe.schedule, recipe.remedy): recipe for recipe in recipes} for recipes in tables]
        overheads = [report.token_overhead(recipes[schedule, remedy], recipes["flush", remedy_of_flush]) for recipes in found]
        return f"{min(overheads):.1f} to {max(overheads):.1f}"

    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{updates('2BW', 'none', 'none')} times as many under 2BW" in readme
    assert f"and {updates('PipeDream m = d', 'none', 'none')} under PipeDream" in readme
    remedied = updates("PipeDream m = d", "Nesterov, half prediction", "Nesterov")
    assert f"{remedied} under PipeDream if both have Nesterov's momentum" in readme


def test_tables_and_pictures_are_made_of_the_results_of_a_run(tmp_path, capsys):
    results, document, other = tmp_path / "learning.json", tmp_path / "learning.md", tmp_path / "other.md"
    results.write_text(json.dumps({"rows": [dataclasses.asdict(row) for row in ROWS], "machine": {"platform": "gpu"}}))
    document.write_text("before\n\n<!-- GPT, 4 stages -->\n\nafter\n")
    other.write_text("no table\n")
    learning.main(["--from-json", str(results), "--documents", str(other), str(document), "--pictures", str(tmp_path)])
    assert other.read_text() == "no table\n"
    assert "| 2BW | prediction | 1.550 (+0.500, 1.25) |" in document.read_text()
    assert "| 2BW | momentum 0 | diverged |" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.svg")} == {"learning-loss.svg", "learning-remedies.svg"}


def test_a_table_without_a_place_is_reported(tmp_path):
    results, document = tmp_path / "learning.json", tmp_path / "learning.md"
    results.write_text(json.dumps({"rows": [dataclasses.asdict(row) for row in ROWS], "machine": {"platform": "gpu"}}))
    document.write_text("no table\n")
    with pytest.raises(SystemExit, match="--documents: expected a line '<!-- GPT, 4 stages -->'"):
        learning.main(["--from-json", str(results), "--documents", str(document)])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--parts", "GPT"], "--parts: unknown part 'GPT'; known: digits, 8 stages, SGD; "),
        (["--updates", "3"], "--updates: expected at least 20, one for each evaluation; found 3"),
        (["--from-json", "nothing.json"], "--from-json: expected results that this program wrote in 'nothing.json'"),
    ],
)
def test_wrong_options_are_reported(arguments, expected):
    with pytest.raises(SystemExit, match=expected):
        learning.main(arguments)


def test_the_tables_of_single_changes_are_those_of_their_results(capsys):
    changes.main(["--from-json", str(changes.FILE)])
    printed = capsys.readouterr().out.strip().split("\n\n")
    pages = "".join((ROOT / "docs" / "explanation" / page).read_text() for page in ("learning.md", "learning-setup.md"))
    for name, text in zip(printed[::2], printed[1::2], strict=True):
        assert f"<!-- {name} -->\n\n{text}\n" in pages


def test_the_table_of_time_to_a_loss_is_that_of_its_results(capsys):
    links.main(["--recipes"])
    page = (ROOT / "docs" / "explanation" / "learning.md").read_text()
    assert f"<!-- time to a loss -->\n\n{capsys.readouterr().out}\n" in page


@pytest.mark.exhaustive
def test_a_part_of_the_grid_runs_and_is_written(tmp_path, capsys):
    results = tmp_path / "learning.json"
    learning.main(["--parts", "digits, 8 stages, SGD", "--updates", "20", "--json", str(results)])
    rows = json.loads(results.read_text())["rows"]
    assert len({row["losses"][-1] for row in rows}) == len(rows) == sum(len(part.variants) for part in grid.SHORT if part.task == "digits")
    assert capsys.readouterr().out.count("\n| flush") == 2
