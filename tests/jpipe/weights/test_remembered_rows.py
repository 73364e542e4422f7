"""Activations sent as changes against what both ends remember of the same rows: the numbers are those of the rule, in every schedule."""

import gc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, LayerStack, Link, Pipeline, Plan, lower, simulate
from jpipe._arguments import checked_rows
from jpipe.programs import LayerCost, sum_layer_costs
from jpipe.runtime import _snapshot
from jpipe.runtime._placement import place_on
from jpipe.stages._calls import trace_call
from jpipe.stages.messages._compress import compress, decompress
from jpipe.stages.messages._messages import compress_message
from tests.jpipe import models, reference, running
from tests.jpipe.weights.test_links import STACK, WIDTH, batches_of, pipeline, plan_of

KINDS = ("int8", "fp8", "bfloat16")
NAMES = ("gpipe", "pipedream_flush", "pipedream", "pipedream_2bw", "zb_h1", "interleaved_1f1b", "zb_v", "early", "one rank")
ONE = {"pipedream_2bw": {"replicas": 1}}  # where other tests have replicas
ROWS = 11  # of the data: fewer than two batches have


def plan_with_rows(name, kind="int8", rounding="nearest", **fields) -> Plan:
    links = {"activations": kind, "gradients": "int8", "rounding": rounding, "rows": ROWS}
    return plan_of(name, links, **{**ONE.get(name, {}), **fields})


def numbers_of(batches, rows=ROWS) -> list[np.ndarray]:
    """Return row numbers for batches: rows come back, once within a batch, and each batch has a row that is none."""
    random, size = np.random.default_rng(5), len(batches[0][0])
    numbers = [random.permutation(rows)[:size] for _ in batches]
    for each in numbers:
        each[2] = -1
    numbers[1][5] = numbers[1][0]
    return numbers


def run(pipe, batches, numbers, state=None, observe=None) -> tuple[running.Trained, object]:
    """Feed all batches, then drain; return what was trained, and the state."""
    state, losses = state or running.fresh(pipe, batches), {}
    for batch, rows in zip(batches, numbers, strict=True):
        state, metrics = pipe.step(state, batch, rows=rows, observe=observe)
        losses |= metrics.losses
    state, metrics = pipe.drain(state, with_metrics=True)
    losses |= metrics.losses
    return running.Trained([float(losses[t]) for t in sorted(losses)], pipe.params(state), running.layer_state(state)), state


def received(links, stage, rng, x, remembered):
    """Round the change of what a stage sends forward, and the gradient that comes back to it."""

    @jax.custom_vjp
    def both(x, remembered):
        change = x - remembered
        sent = compress_message(links, change, "activations", stage, rng)
        return remembered + decompress(sent, links.activations, change)

    def backward(_, g):
        sent = compress_message(links, [g], "gradients", stage + 1, rng)
        return decompress(sent, links.gradients, [g])[0], None

    both.defvjp(lambda x, remembered: (both(x, remembered), None), backward)
    return both(x, remembered)


def rule(pipe, batches, numbers, params, key):
    """Apply the rule, microbatch after microbatch: return the losses, the weights, and what is remembered at each cut."""
    plan, m = pipe.plan, pipe.plan.microbatches
    stage_of = {layer_id: s for s, stage in enumerate(plan.stages) for layer_id in stage.layers}

    @partial(jax.grad, has_aux=True)
    def gradient_of(read, remembered, x, labels, k):
        sent = []
        for i in STACK.ids:
            x, _ = STACK.apply([i], {i: read[i]}, {i: {}}, x, key=key, microbatch=k, train=True)
            if (s := stage_of[i]) < plan.depth - 1 and i == plan.stages[s].layers[-1]:
                x = received(plan.links, s, (k, key), x, remembered[s])
                sent.append(x)
        total, weight = pipe.loss(x, labels)
        return total, (total, weight, sent)

    gradient_of, updated = jax.jit(gradient_of), jax.jit(lambda g, state, p: pipe.optimizer.update(g, state, p))
    versions, state, losses = [params], pipe.optimizer.init(params), []
    remembered = [np.zeros((ROWS, WIDTH)) for _ in plan.stages[1:]]
    for t, (batch, rows) in enumerate(zip(batches, numbers, strict=True)):
        parts, seen = [], set()
        for k in range(t * m, (t + 1) * m):
            x, labels, of_rows = jax.tree.map(lambda a, k=k: a.reshape(m, -1, *a.shape[1:])[k % m], (*batch, rows))
            known = [-1 if row in seen else int(row) for row in of_rows]
            seen.update(known)
            read = {i: versions[reference.version(plan, stage_of[i], k)][i] for i in STACK.ids}
            before = [np.stack([m_of[row] if row >= 0 else np.zeros(WIDTH) for row in known]) for m_of in remembered]
            gradient, (*of_loss, sent) = gradient_of(read, before, x, labels, np.uint32(k))
            for m_of, activations in zip(remembered, sent, strict=True):
                for row, activation in zip(known, np.asarray(activations), strict=True):
                    if row >= 0:
                        m_of[row] = np.where(np.isfinite(activation), activation, 0)
            parts.append((gradient, of_loss))
        total, weight = (sum(float(numbers[j]) for _, numbers in parts) for j in range(2))
        mean = jax.tree.map(lambda *g, weight=weight: sum(g) / weight, *(gradient for gradient, _ in parts))
        changes, state = updated(mean, state, versions[-1])
        versions.append(jax.tree.map(np.add, versions[-1], changes))
        losses.append(total / weight)
    return losses, versions[-1], remembered


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(most=3)
def test_equals_the_rule_and_both_ends_remember_the_same_bits(name, kind, rounding):
    plan = plan_with_rows(name, kind, rounding)
    pipe, batches = pipeline(plan), batches_of(plan)
    numbers, state = numbers_of(batches), running.fresh(pipe, batches)
    losses, params, remembered = rule(pipe, batches, numbers, jax.tree.map(np.asarray, pipe.params(state)), jax.random.key(running.KEY))
    found, state = run(pipe, batches, numbers, state)
    running.check_close((found.losses, found.params), (losses, params))
    for s, m_of in enumerate(remembered):
        (sent,), (arrived,) = state.workers[s].remembered["sent"], state.workers[s + 1].remembered["received"]
        running.check_equal(sent, arrived)
        running.check_close(sent, m_of)


def test_the_error_of_rows_that_come_back_falls():
    """With small steps the model changes little from epoch to epoch, and what is received comes close to what was computed."""
    stack = LayerStack({"in": models.dense(WIDTH), "out": models.dense()})
    batches = models.masked_batches(1, 2) * 4
    errors = {}
    for rows in (None, len(batches[0][0])):
        links = {"activations": "int8", "rows": rows}
        plan = Plan.even(stack.ids, 2, "gpipe", 2, links=links)
        pipe = Pipeline(stack, plan, models.masked_squares, optax.sgd(1e-3), jax.devices()[:1] * 2)
        state = running.fresh(pipe, batches)
        numbers = None if rows is None else np.arange(rows)
        errors[rows] = []
        for batch in batches:
            exact, _ = stack.apply(["in"], pipe.params(state), {"in": {}}, jnp.asarray(batch[0]), key=None, microbatch=0, train=True)
            state, _ = pipe.step(state, batch, rows=numbers)
            (last,) = state.workers[1].remembered["received"] if rows else [decompress(compress(exact, "int8"), "int8", exact)]
            errors[rows].append(float(jnp.abs(last - exact).max()))
    plain, remembering = errors.values()
    assert min(plain) > 1e-3
    assert remembering[0] == plain[0]
    assert max(remembering[1:]) < plain[0] / 20


RESUMED = ("pipedream_2bw", "pipedream", "pipedream_flush")


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_from_a_snapshot_equals_the_run_that_continued(name):
    plan = plan_with_rows(name, rounding="stochastic", num_stages=3)
    pipe, batches, cut = pipeline(plan), models.masked_batches(6, plan.microbatches), 3
    numbers, snapshot = numbers_of(batches), None
    state, losses = running.fresh(pipe, batches), {}
    snapshot = pipe.snapshot(cut)
    for batch, rows in zip(batches, numbers, strict=True):
        state, metrics = pipe.step(state, batch, rows=rows, observe=None if snapshot.complete else snapshot)
        losses |= metrics.losses
    state, metrics = pipe.drain(state, with_metrics=True)
    losses |= metrics.losses
    layers = jax.tree.map(np.asarray, snapshot.layers())
    restored = pipe.restore(jax.random.key(running.KEY), batches[0], layers, cut)
    found, again = run(pipe, batches[cut:], numbers[cut:], restored)
    assert found.losses == [float(losses[t]) for t in sorted(losses) if t >= cut]
    running.check_equal(found.params, pipe.params(state))
    running.check_equal(*([worker.remembered for worker in one.workers] for one in (again, state)))


def arrays_of(rows) -> int:
    """Return how many arrays of remembered activations are in the memory of devices."""
    gc.collect()
    return sum(array.shape == (rows, WIDTH) for array in jax.live_arrays())


@pytest.mark.slow
def test_a_snapshot_and_a_restored_run_have_each_array_once(monkeypatch):
    """A snapshot has one end of the cut, whose bits the other end has, too; a restored worker gets each array without copies on the way."""
    rows, found = 23, []

    def counting(function):
        def counted(*arguments):
            result = function(*arguments)
            found.append(arrays_of(rows))
            return result

        return counted

    plan = plan_of("pipedream_flush", {"activations": "int8", "rows": rows})
    pipe, batches = pipeline(plan), models.masked_batches(2, plan.microbatches)
    state, snapshot = running.fresh(pipe, batches), pipe.snapshot(1)
    assert arrays_of(rows) == 2
    monkeypatch.setattr(_snapshot, "_copied", counting(_snapshot._copied))
    state, _ = pipe.step(state, batches[0], rows=range(8), observe=snapshot)
    assert max(found) == 3
    layers, before = jax.tree.map(np.array, (snapshot.layers(), state.workers[0].remembered["sent"]))  # copies
    saved = [(name, *plain["remembered"]) for name, plain in layers.items() if "remembered" in plain]
    assert saved == [(plan.stages[1].layers[0], "received")]
    del state, snapshot
    found.clear()
    monkeypatch.setattr(_snapshot, "weights_of", counting(_snapshot.weights_of))
    for fresh in (False, True):
        state = pipe.restore(jax.random.key(0), batches[0], layers, 1, fresh_optimizer=fresh)
        both = [state.workers[0].remembered["sent"], state.workers[1].remembered["received"]]
        running.check_equal(both, [jax.tree.map(np.zeros_like, before) if fresh else before] * 2)
        del state, both
    assert found == [0, 1, 0, 1]
    of_first = {name: plain for name, plain in layers.items() if name in plan.stages[0].layers}
    with pytest.raises(InputError, match=r"activations of rows: expected them for the stage before it, too, because of plan\.links\.rows"):
        pipe.restore(jax.random.key(0), batches[0], of_first, 1)
    del layers[plan.stages[1].layers[0]]["remembered"]
    assert not np.any(pipe.restore(jax.random.key(0), batches[0], layers, 1).workers[0].remembered["sent"])


@pytest.mark.slow
def test_another_plan_keeps_what_is_remembered_at_the_same_cuts():
    plan = plan_with_rows("pipedream_flush", num_stages=3)
    pipe, batches = pipeline(plan), models.masked_batches(2, plan.microbatches)
    state, snapshot = running.fresh(pipe, batches), pipe.snapshot(2)
    for batch, rows in zip(batches, numbers_of(batches), strict=True):
        state, _ = pipe.step(state, batch, rows=rows, observe=snapshot)
    layers, key = jax.tree.map(np.asarray, snapshot.layers()), jax.random.key(running.KEY)
    before = [worker.remembered for worker in state.workers]

    def restored(links, *cuts, **options):
        stages = [{"layers": STACK.ids[start:end]} for start, end in zip((0, *cuts), (*cuts, None), strict=True)]
        other = pipeline(Plan(schedule="gpipe", microbatches=4, stages=stages, links=links))
        return [worker.remembered for worker in other.restore(key, batches[0], layers, 2, **options).workers]

    changed = restored({"activations": "fp8", "rows": ROWS}, 1, 2)  # the first cut is another one, the second one is that of before
    assert [stage.layers for stage in plan.stages] == [("first", "second"), ("mix",), ("out",)]
    running.check_equal((changed[1]["sent"], changed[2]["received"]), (before[0]["sent"], before[1]["received"]))
    fresh = [changed[0], changed[1]["received"], restored({"activations": "int8", "rows": ROWS + 1}, 2, 3)]
    fresh.append(restored({"activations": "int8", "rows": ROWS}, 2, 3, fresh_optimizer=True))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(fresh))
    assert restored({"activations": "int8"}, 2, 3) == [{}, {}, {}]


def test_nan_is_received_and_not_remembered():
    plan = plan_with_rows("gpipe", num_stages=3)
    pipe, batches = pipeline(plan, skip_nonfinite=True), models.masked_batches(3, plan.microbatches)
    batches[1][0][0] = np.nan
    numbers = [np.arange(len(batches[0][0]))] * 3
    state, _ = pipe.step(running.fresh(pipe, batches), batches[0], rows=numbers[0])
    params = jax.tree.map(np.asarray, pipe.params(state))
    state, metrics = pipe.step(state, batches[1], rows=numbers[1])
    assert bool(metrics.nonfinite[1])
    running.check_equal(jax.tree.map(np.asarray, pipe.params(state)), params)
    for cut in range(2):
        (sent,), (arrived,) = state.workers[cut].remembered["sent"], state.workers[cut + 1].remembered["received"]
        running.check_equal(sent, arrived)
        assert not np.any(sent[0])
        assert np.isfinite(sent).all()
        assert np.any(sent[1])
    _, metrics = pipe.step(state, batches[2], rows=numbers[2])
    assert np.isfinite(float(metrics.losses[2]))


def test_evaluations_round_to_nearest_and_change_nothing_that_is_remembered():
    plan = plan_with_rows("pipedream_2bw", rounding="stochastic", num_stages=3)
    pipe, batches = pipeline(plan), models.masked_batches(3, plan.microbatches)
    found, state = run(pipe, batches, numbers_of(batches))
    before = jax.tree.map(np.asarray, [worker.remembered for worker in state.workers])
    x = jnp.asarray(batches[0][0])
    for stage in plan.stages:
        x, _ = STACK.apply(stage.layers, found.params, {layer_id: {} for layer_id in STACK.ids}, x, key=None, microbatch=0, train=False)
        x = x if stage is plan.stages[-1] else decompress(compress(x, "int8"), "int8", x)
    total, weight = pipe.loss(x, batches[0][1])
    assert float(pipe.evaluate(state, batches[0]).loss) == pytest.approx(float(total / weight), rel=1e-5)
    np.testing.assert_allclose(pipe.predict(state, batches[0][0][:3]), x[:3], rtol=1e-5, atol=1e-5)
    running.check_equal([worker.remembered for worker in state.workers], before)


@pytest.mark.slow
def test_arrays_without_rows_are_sent_as_without_memory():
    """Whole numbers, thin arrays and ones that do not begin with the rows of the microbatch, beside one of 16 bits that is remembered."""

    def begin(x):
        wide = jnp.tile(x, (1, 16))
        return {"wide": wide.astype(jnp.bfloat16), "thin": x[:, :1], "number": jnp.arange(3), "turned": wide.T}

    def end(tree):
        turned = tree["turned"].T[:, :3]
        return tree["wide"][:, :3].astype(turned.dtype) + tree["thin"] + tree["number"].astype(turned.dtype)[None, :] + turned

    stack = LayerStack({"in": models.dense(), "begin": begin, "end": end, "out": models.dense()})
    plan = Plan.even(stack.ids, 2, "gpipe", 2, links={"activations": "int8", "rows": 4})
    pipe, batches = pipeline(plan, stack), models.masked_batches(3, 2)
    found, state = run(pipe, batches, [np.arange(4)] * 3)
    (remembered,) = state.workers[1].remembered["received"]
    assert (remembered.shape, remembered.dtype) == ((4, 48), jnp.bfloat16)
    assert np.isfinite(found.losses).all()
    without = running.train(pipeline(plan.model_copy(update={"links": None}), stack), batches)
    running.check_close(found.losses, without.losses, tolerance=0.05)


def test_what_is_remembered_and_sent_is_counted():
    """At each end of a cut 11 rows of 40 numbers of float32; a message has the number of each of its 2 rows, too."""
    batch = models.masked_batches(1, 4)[0]
    first, second = pipeline(plan_with_rows("pipedream_flush")).costs(batch)
    assert (first.remembered, second.remembered) == (ROWS * WIDTH * 4,) * 2
    assert first.outputs == second.inputs == 2 * (WIDTH + 4 + 4)
    moved = simulate(lower(plan_with_rows("pipedream_flush"), 1), (first, second), Link(bandwidth=100.0)).moved_bytes
    assert moved == (4 * 96, 4 * 92)
    layers = {layer_id: LayerCost(1.0, 2.0, outputs=2048, residuals={"none": 0}) for layer_id in STACK.ids}
    summed = sum_layer_costs(plan_with_rows("gpipe", num_stages=3), layers, rows=2)
    assert [cost.remembered for cost in summed] == [ROWS * 1024, 2 * ROWS * 1024, ROWS * 1024]


@pytest.mark.parametrize(
    ("turn", "back", "found"),
    [(jnp.transpose, jnp.transpose, r"float32\[40, 2\]"), (lambda x: x[:, 0], lambda x: x[:, None], r"float32\[2\]")],
)
def test_a_cut_at_which_nothing_is_remembered_is_refused(turn, back, found):
    stack = LayerStack({"in": models.dense(WIDTH), "turn": turn, "back": back, "out": models.dense()})
    words = r"plan: links\.rows: expected between layers 'turn' and 'back' an array that int8 makes smaller, .* 2 rows .*"
    with pytest.raises(InputError, match=f"{words} found {found}; cut the model elsewhere, or remove rows"):
        pipeline(Plan.even(stack.ids, 2, "gpipe", 4, links={"activations": "int8", "rows": 5}), stack).check(models.masked_batches(1, 4)[0])


def test_the_message_of_a_batch_changes_what_is_remembered_in_place():
    """The scratch memory of the program does not grow with the rows of the data."""
    plan = plan_with_rows("gpipe", num_stages=3)
    plan = plan.model_copy(update={"links": plan.links.model_copy(update={"rows": 2000})})
    functions = pipeline(plan).stage_functions(models.masked_batches(1, plan.microbatches)[0])
    for s, end in ((0, "sent"), (1, "received"), (1, "sent"), (2, "received")):
        memory = (
            trace_call(functions[s], place_on(jax.devices()[0], functions[s].partition.mesh), f"receive_change {end}")
            .lower()
            .compile()
            .memory_analysis()
        )
        assert memory.alias_size_in_bytes >= 2000 * WIDTH * 4
        assert memory.temp_size_in_bytes < 2000 * WIDTH * 4 / 20


def test_the_sender_counts_the_activations_that_it_drops():
    batch, devices = models.masked_batches(1, 4)[0], jax.devices()[:1]
    (first, _), (plain, _) = (
        pipeline(plan).costs(batch, compiled_for=devices[0]) for plan in (plan_with_rows("gpipe"), plan_of("gpipe", None))
    )
    assert first.temporary - plain.temporary >= 2 * 2 * WIDTH * 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"links": {"rows": 5}}, r"plan: links\.rows: expected links\.activations with it, found 5 without"),
        ({"links": {"activations": "int8", "rows": 0}}, r"plan: links\.rows: "),
        ({"replicas": 2}, r"plan: links\.rows: expected stages without replicas, .*, found \[2, 2\]; remove rows"),
        ({"mesh": {"data": 2}}, r"plan: links\.rows: expected stages on one device each, found the mesh \{'data': 2\} at stage 0"),
    ],
)
def test_plans_that_cannot_remember_rows_are_refused(fields, words):
    with pytest.raises(InputError, match=words):
        Plan.even(STACK.ids, 2, **{"links": {"activations": "int8", "rows": 5}, **fields})


def test_wrong_numbers_of_rows_are_refused_and_the_state_stays():
    plan = plan_with_rows("gpipe")
    pipe, batches = pipeline(plan), models.masked_batches(1, 4)
    state, expected = running.fresh(pipe, batches), r"rows: expected 8 integers from -1 to 10, .*, because plan\.links\.rows is 11, found "
    for rows, found in (
        (None, r"none; call step\(state, batch, rows=\.\.\.\)"),
        ([*range(7), 11], r"11; raise links\.rows"),
        ([*range(7), -2], "-2; raise"),
        (range(7), r"int64\[7\]; give one number for each row"),
        (np.zeros(8), r"float64\[8\]; give one number"),
    ):
        with pytest.raises(InputError, match=expected + found):
            pipe.step(state, batches[0], rows=rows)
    with pytest.raises(InputError, match=expected + r"\[\[1\], \[1, 2\]\], which is no array \(.*\); give one number for each row"):
        checked_rows([[1], [1, 2]], plan, 8)  # the types of tests do not let it through `step`
    pipe.step(state, batches[0], rows=range(8))
    plain = pipeline(plan_of("gpipe", {"activations": "int8"}))
    with pytest.raises(InputError, match=r"rows: expected none without links\.rows in the plan, found some"):
        plain.step(running.fresh(plain, batches), batches[0], rows=range(8))
    with pytest.raises(InputError, match=r"buckets: expected batches of one shape with plan\.links\.rows, found microbatches of "):
        pipe.init(jax.random.key(0), batches[0], buckets=models.masked_batches(1, 4, dtype=np.float16))


@pytest.mark.slow
def test_an_interrupted_step_is_not_made_twice():
    """The numbers of the rows are a part of the batch."""
    plan = plan_with_rows("pipedream_2bw")
    pipe, batches = pipeline(plan), models.masked_batches(3, 4)
    numbers = numbers_of(batches)
    expected, _ = run(pipe, batches, numbers)
    state = running.fresh(pipe, batches)

    def interrupt(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe.step(state, batches[0], rows=numbers[0], observe=interrupt)
    found, _ = run(pipe, batches, numbers, state)
    assert found.losses == expected.losses
    running.check_equal(found.params, expected.params)
