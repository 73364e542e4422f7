"""The study of rare agreement and of messages with few bits: its emulation equals the pipeline, and its tables its results."""

import functools
import json
import math
import re
from dataclasses import asdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.learning import agree, bottlenecks, exchange, grid
from benchmarks.learning.emulation import Emulation
from benchmarks.learning.grid import OPTIMIZERS, Row, Variant
from jpipe import Layer, LayerStack, Pipeline, Plan
from jpipe.capabilities.compressed_messages.compress import compress, decompress
from jpipe.optimizers import compensated_adamw
from jpipe.plan import Agreement
from tests.jpipe import models, running
from tests.test_learning import CLIP, RATE, ROOT, SCHEDULE, STACK, UPDATES, D

W, M = 2, 4


@pytest.fixture(autouse=True)
def promotion():
    """Allow standard promotion, which optax needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def emulated(setting, batches, start):
    """Return the last weights of pipelines in float64: two of them where they agree, otherwise one."""
    variant = setting.variant
    recipe = variant.recipe(0, RATE, 0.9, D, M)._replace(stage_clip=np.float64(variant.schedule == "2BW"))
    recipe = recipe._replace(rate=np.float64(RATE), momentum=np.float64(0.9))
    exchanged = setting.exchange(D)
    if setting.agree:
        outer = setting.agree.outer
        exchanged = exchanged._replace(rate=np.float64(outer.learning_rate), momentum=np.float64(outer.momentum))
    rule, stages = OPTIMIZERS["Adam"].rule, [(layer_id,) for layer_id in STACK.ids]
    emulation = Emulation(STACK, stages, models.squares, rule, SCHEDULE, 1, 2, CLIP)
    data = jax.tree.map(lambda *leaves: np.stack(leaves)[:, None], *batches)
    return jax.jit(exchange.Pipelines(emulation, W if setting.agree else 1, bits=setting.agree and setting.agree.bits).train)(
        recipe, exchanged, start, data, batches[0]
    )[1]


def agreeing(schedule, every, **fields):
    return agree.Setting("", "", Variant(schedule, "delay"), Agreement(every=every, **fields))


def sending(kind):
    return agree.Setting("", "", Variant("flush", "delay"), messages=kind)


@pytest.mark.slow
@pytest.mark.thinned(most=2)
@pytest.mark.parametrize(
    "setting",
    [
        agreeing("2BW", 4, fragments="stages", delay=2, mixing=0.25),
        agreeing("flush", 3, outer={"learning_rate": 0.5, "momentum": 0.0}),
        agreeing("flush", 1),
        agreeing("flush", 3, fragments="stages"),
        agreeing("flush", 3, delay=1),
        agreeing("2BW", 2),
        agreeing("2BW", 3, delay=1, bits=2),
        agreeing("flush", 2, fragments="stages", bits=4),
        *map(sending, ("bfloat16", "int8", "fp8")),
    ],
)
def test_the_emulation_equals_the_pipeline(setting):
    """In float64, with clipping, and a learning rate that changes."""
    with jax.enable_x64(True):
        flush, count = setting.variant.schedule == "flush", W if setting.agree else 1
        optimizer = compensated_adamw(lambda t: RATE * SCHEDULE(t), b2=grid.ADAM_B2, weight_decay=grid.WEIGHT_DECAY)
        fields = {"agree": setting.agree} if setting.agree else {"links": {"activations": setting.messages, "gradients": setting.messages}}
        plan = Plan.even(STACK.ids, D, "pipedream_flush" if flush else "pipedream_2bw", M * count, replicas=count, **fields)
        clip = {"clip_global_norm" if flush else "clip_stage_norm": CLIP}
        pipe = Pipeline(STACK, plan, models.squares, optimizer, jax.devices()[: D * count], **clip)
        batches = models.batches_of(UPDATES, M * count, dtype=np.float64)
        state = running.fresh(pipe, batches)
        start = jax.tree.map(np.array, models.on_first_device(pipe.params(state)))  # the steps consume the state
        for batch in batches:
            state, _ = pipe.step(state, batch)
        state = pipe.drain(state)
        running.check_close(models.on_first_device(pipe.params(state)), emulated(setting, batches, start))


FACTORS = [0.5, 1.5, -1.0]  # the weights of the layers, which multiply by a number each


@functools.cache
def trained_factors():
    """Return a program that trains one layer for each stage with SGD, in two pipelines."""

    def apply(params, state, x, key, train):
        return params["w"] * x, state

    stack = LayerStack({f"layer{s}": Layer(lambda key, x: ({"w": jnp.ones(())}, {}), apply) for s in range(len(FACTORS))})
    stages = [(layer_id,) for layer_id in stack.ids]
    emulation = Emulation(stack, stages, models.squares, OPTIMIZERS["SGD"].rule, lambda t: 1.0, 1, 2, None)
    return jax.jit(exchange.Pipelines(emulation, W, rounds=False).train)


def agreed_factors(agree, rate, age, batches):
    """Return the agreed weights that are read after each update, by the rule of `Agreement` in plain Python.

    Args:
        agree: the agreements, stage by stage.
        rate: the learning rate.
        age: how many updates old the weights are that gradients are computed with.
        batches: the inputs and labels of each update.
    """
    pipelines = [[FACTORS] for _ in range(W)]  # the versions of each
    agreed, momentum, changes, reads = [*FACTORS], [0.0 for _ in FACTORS], {}, []

    def outer_step(s, change):
        velocity = change + agree.outer.momentum * momentum[s]
        return agreed[s] - agree.outer.learning_rate * (change + agree.outer.momentum * velocity), velocity

    for u, batch in enumerate(batches):
        for k, versions in enumerate(pipelines):
            x, y = (rows.reshape(M, W, -1)[:, k] for rows in batch)
            factors = versions[max(u - age, 0)]
            slope = np.mean(2 * (math.prod(factors) * x - y) * x)
            versions.append([w - rate * slope * math.prod(factors) / f for w, f in zip(versions[-1], factors, strict=True)])
        for s in range(len(FACTORS)):
            if (u + 1 - s * agree.every // len(FACTORS)) % agree.every == 0:
                changes[s, u + agree.delay] = np.mean([agreed[s] - versions[-1][s] for versions in pipelines])
            if (s, u) in changes:
                agreed[s], momentum[s] = outer_step(s, changes.pop((s, u)))
                for versions in pipelines:
                    kept = agree.mixing if agree.delay else 0.0
                    versions[-1][s] = kept * versions[-1][s] + (1 - kept) * agreed[s]
        under_way = {s: outer_step(s, change)[0] for (s, _), change in changes.items()}
        reads.append([under_way.get(s, agreed[s]) for s in range(len(FACTORS))])
    return reads


@pytest.mark.parametrize("schedule", ["flush", "2BW"])
@pytest.mark.parametrize("fields", [{}, {"delay": 1}, {"delay": 1, "mixing": 0.0}, {"delay": 2}, {"delay": 2, "mixing": 0.0}])
def test_late_agreements_follow_the_rule(fields, schedule):
    """After each of 8 updates in float64, stage by stage: also what is read while an agreement is under way."""
    with jax.enable_x64(True):
        setting = agreeing(schedule, 3, fragments="stages", outer={"learning_rate": 0.75, "momentum": 0.5}, **fields)
        rng, d, rate = np.random.default_rng(0), len(FACTORS), 1 / 16
        batches = [tuple(rng.normal(size=(2, M * W * 2, 1))) for _ in range(8)]
        data = jax.tree.map(lambda *leaves: np.stack(leaves)[:, None], *batches)
        start = {f"layer{s}": {"w": np.float64(factor)} for s, factor in enumerate(FACTORS)}
        recipe = setting.variant.recipe(0, rate, 0.0, d, M)
        losses, weights = trained_factors()(recipe, setting.exchange(d), start, data, batches[0])
    reads = agreed_factors(setting.agree, rate, int(schedule == "2BW"), batches)
    x, y = batches[0]
    np.testing.assert_allclose(losses, [np.mean((math.prod(factors) * x - y) ** 2) for factors in reads], rtol=1e-12)
    np.testing.assert_allclose([weights[f"layer{s}"]["w"] for s in range(d)], reads[-1], rtol=1e-12)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "fp8"])
def test_numbers_are_rounded_as_in_messages(kind):
    x = jax.random.normal(jax.random.key(0), (3, 5, 120)) * jnp.exp(jnp.arange(3.0))[:, None, None]
    expected = decompress(compress(x, kind), kind, x)
    np.testing.assert_array_equal(exchange.rounded(x, exchange.format_of(kind), jax.random.key(0)), expected)
    keys = jax.random.split(jax.random.key(1), 2000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: exchange.rounded(x, exchange.format_of(kind, True), key)))(keys))
    assert len(np.unique(drawn[:, 0, 0, 0])) == 2
    np.testing.assert_allclose(drawn.mean(0), x, rtol=0, atol=0.1 * np.abs(drawn - np.asarray(x)).max())


def test_sums_with_feedback_lose_nothing_in_the_long_run():
    """What all sums together lack is the error that is kept; without feedback it is lost."""
    own = {"w": jax.random.normal(jax.random.key(0), (W, 4, 5))}
    keys = jax.random.split(jax.random.key(1), W)
    lost = {}
    for feedback in (True, False):
        settings = agree.Setting("", "", sums="int8", feedback=feedback).exchange(D)
        errors, total, sums = jax.tree.map(jnp.zeros_like, own), 0.0, jax.jit(partial(exchange.sums, settings))
        for _ in range(50):
            used, errors = sums(own, errors, keys)
            total = total + used["w"][0]
        lost[feedback] = jnp.abs(total - 50 * own["w"].mean(0)).max()
        assert feedback is False or jnp.allclose(total + errors["w"].mean(0), 50 * own["w"].mean(0), atol=1e-3)
    assert 5 * lost[True] < lost[False]


def rows_of(settings, losses):
    return [
        Row("4 pipelines, Adam, 100 updates", D, "Adam", group, name, rate, seed, 50, [3.0, loss + 0.01 * seed + extra])
        for (group, name), loss in zip(settings, losses, strict=True)
        for rate, extra in ((0.002, 0.5), (0.004, 0.0))
        for seed in range(2)
    ]


ROWS = rows_of([("exact sums", "data parallelism"), ("agreement", "every 50, means"), ("rounded sums", "int8")], [1.0, 1.25, np.nan])


def test_settings_are_compared_with_data_parallelism_at_its_best_rate(tmp_path, capsys):
    results, document = tmp_path / "agree.json", tmp_path / "page.md"
    results.write_text(json.dumps({"rows": [asdict(row) for row in ROWS], "machine": {"platform": "gpu"}}))
    document.write_text("<!-- 4 pipelines, Adam, 100 updates -->\n")
    agree.main(["--from-json", str(results), "--documents", str(document), "--pictures", str(tmp_path)])
    for text in (capsys.readouterr().out, document.read_text()):
        assert "| exact sums | data parallelism | 1.505 | 1.005 | – |" in text
        assert "| agreement | every 50, means | 1.755 | 1.255 | +0.250 (+0.250 to +0.250) |" in text
        assert "| rounded sums | int8 | diverged | diverged | – |" in text
    assert (tmp_path / "learning-agree.svg").exists()


def test_the_tables_of_the_page_are_those_of_the_results(capsys):
    agree.main(["--from-json", str(agree.RESULTS)])
    tables = capsys.readouterr().out.strip().split("\n\n")
    page = (ROOT / "docs" / "explanation" / "learning-agree.md").read_text()
    assert sorted(tables[::2]) == sorted(re.findall(r"^<!-- (.*) -->$", page, re.MULTILINE))
    for place, table in zip(tables[::2], tables[1::2], strict=True):
        assert f"<!-- {place} -->\n\n{table}\n" in page


def test_the_tables_of_narrow_cuts_are_those_of_the_results(capsys):
    bottlenecks.main(["--from-json", str(bottlenecks.RESULTS)])
    tables = capsys.readouterr().out.strip().split("\n\n")
    page = (ROOT / "docs" / "explanation" / "narrow-cuts.md").read_text()
    for place, table in zip(tables[::2], tables[1::2], strict=True):
        assert f"<!-- {place} -->\n\n{table}\n" in page


def test_wrong_options_are_reported():
    with pytest.raises(SystemExit, match="--updates: expected a multiple of 50, found 70"):
        agree.main(["--updates", "70"])


@pytest.mark.exhaustive
def test_a_part_of_the_study_runs_and_is_written(tmp_path):
    results = tmp_path / "agree.json"
    few = ["--parts", "600 updates", "--rates", "0.002", "--seeds", "1", "--updates", "50"]
    agree.main([*few, "--settings", "data parallelism", "every 50", "--json", str(results)])
    rows = json.loads(results.read_text())["rows"]
    assert [(row["task"], row["remedy"]) for row in rows if "2BW" in row["task"]] == [
        ("4 pipelines, 4 stages, width 128, 2BW, Adam, Nesterov, 50 updates", name) for name in ("data parallelism", "every 50")
    ]
    assert len({row["losses"][0] for row in rows}) == len(rows) == 6
