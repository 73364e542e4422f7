"""The parts of `jpipe plan`: candidates that are left out, and plans that are compiled."""

import contextlib
import dataclasses
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import jpipe
from jpipe import InputError
from jpipe.plan import Agreement
from jpipe_planner import Plans, Profile, Topology
from jpipe_planner.profile.profile import HalfRows
from jpipe_planner.ranking import variants
from jpipe_planner.ranking.find import Compiled
from jpipe_planner.search.candidate import Extras
from jpipe_planner.search.candidates import find_candidates
from jpipe_train.config.config import Config
from jpipe_train.config.plan_config import PlanConfig
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from jpipe_train.plan import auto
from jpipe_train.plan import compiling as confirming
from jpipe_train.plan import search as searching
from jpipe_train.plan.compiling import confirm, of_this_machine
from jpipe_train.plan.inputs import Request, prepare_devices
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import search

IDS = ("first", "second", "third")
LAYERS = {i: lambda x: x + 1 for i in IDS}
SPEC = jax.ShapeDtypeStruct((1, 2), np.float32)
TWO = Topology.flat(2, 1e9)
HALVES = HalfRows(work=(0.5, 0.5), residuals={})


def profile(weights: int = 10**6, dispatch: float = 0.0) -> Profile:
    """Return equal layers, three for two devices: data parallelism is fastest and holds most memory."""
    at = [
        {"forward": 0.01 * n, "backward": 0.02 * n, "outputs": 100 * n, "residuals": {"none": 10**6 * n, "full": 100 * n}} for n in (1, 2)
    ]
    layers = [{"id": i, "weights": weights, "optimizer": 2 * weights, "at": at} for i in IDS]
    return Profile(source="measured", sizes=(1, 2), inputs=(8, 16), labels=(8, 16), dispatch=dispatch, layers=layers)


def parts() -> Parts:
    def loss(y, labels):
        return jnp.sum(y), jnp.ones(())

    return Parts(jpipe.LayerStack(LAYERS), loss, optax.sgd(0.1), (SPEC, SPEC), Config())


def silent() -> Reporter:
    return Reporter(1, 1, "samples", Console(file=io.StringIO(), width=200))


def searched(topology: Topology, weights: int = 10**6, dispatch: float = 0.0) -> Plans:
    return search(profile(weights, dispatch), topology, 8, Request(schedules=("all",)), False, silent())


@pytest.fixture
def fits(monkeypatch):
    """Return a function that replaces compilation by `answer`, and returns the list of compiled plans."""

    def use(answer):
        requests = []

        def compiled(choice, ranked, *_):
            requests.append(ranked.candidate)
            return Compiled(ranked, ranked.candidate.memory, 0.0 if answer(ranked.candidate) else 2000.0, ())

        monkeypatch.setattr(confirming, "compile_stages", compiled)
        return requests

    return use


def test_plans_of_too_many_microbatches_are_counted(monkeypatch):
    reporter = Reporter(1, 1, "samples", Console(file=(output := io.StringIO()), width=200))
    request = Request(schedules=("pipedream_flush",))
    everything = search(profile(), TWO, 8, request, False, reporter)
    monkeypatch.setattr(searching, "MOST_MICROBATCHES", 4)
    result = search(profile(), TWO, 8, request, False, reporter)
    assert {candidate.rows for candidate in everything.candidates} == {1, 2}
    left_out = len(result.excluded)
    assert left_out == sum(
        one.rows == 1 and one.schedule == "pipedream_flush" for one in find_candidates(profile(), TWO, 8, schedules=request.schedules)
    )
    assert output.getvalue() == f"{left_out} candidates left out, with more than 4 microbatches\n"
    assert {candidate.rows for candidate in result.candidates} == {2}


def test_stages_of_pipelines_that_agree_are_not_searched():
    reporter = Reporter(1, 1, "samples", Console(file=(output := io.StringIO()), width=200))
    search(profile(), TWO, 8, Request(schedules=("pipedream",), extras=Extras(agree=Agreement(every=4))), False, reporter)
    words = "left out: different numbers of replicas per stage, because pipelines that agree have equal stages"
    assert output.getvalue().count(f"{words}\n") == 1


def test_schedules_without_an_order_for_slices_are_left_out():
    reporter, request = Reporter(1, 1, "samples", Console(file=(output := io.StringIO()), width=200)), Request(extras=Extras(slices=2))
    layers = [layer.model_copy(update={"halves": HALVES}) for layer in profile().layers]
    in_halves = profile().model_copy(update={"layers": tuple(layers), "positions": 8})
    plans = search(in_halves, TWO, 8, request, False, reporter)
    assert {one.slices for one in plans.candidates} == {2}
    assert output.getvalue().count("left out, because of plan.slices: zb_v: it has no order for slices\n") == 1
    with pytest.raises(InputError, match=r"--schedules: zb_v, naive cannot be used with plan\.slices: it has no order for slices"):
        search(in_halves, TWO, 8, dataclasses.replace(request, schedules=("zb_v", "naive")), False, silent())


def test_a_search_says_why_it_tries_no_slices():
    reporter = Reporter(1, 1, "samples", Console(file=(output := io.StringIO()), width=200))
    search(profile().model_copy(update={"uncut": "a kernel computes the attention"}), TWO, 8, Request(), False, reporter)
    assert output.getvalue().count("left out: slices of rows, because a kernel computes the attention\n") == 1


def test_only_schedules_that_flush_are_considered_by_default():
    def schedules(**options) -> set[str]:
        result = search(profile(), TWO, 8, Request(replicas=False, **options), False, silent())
        return {candidate.schedule for candidate in result.candidates}

    rules = jpipe.schedules.SCHEDULES
    flushing = schedules()
    assert "pipedream_flush" in flushing
    assert all(rules[name].flushes for name in flushing)
    assert {"pipedream", "pipedream_2bw"} <= schedules(schedules=("all",))
    assert schedules(schedules=("pipedream_2bw",)) == {"pipedream_2bw"}
    assert schedules(pipedream="replicas") - flushing == {"pipedream"}


def test_the_gain_of_delayed_weights_is_known_where_they_were_not_requested():
    def delayed(devices: int, **options):
        topology = Topology.flat(devices, 1e9)
        return search(profile(dispatch=0.05), topology, 4, Request(replicas=False, **options), False, silent())

    result = delayed(3)
    assert result.delayed is not None
    assert not jpipe.schedules.SCHEDULES[result.delayed.candidate.schedule].flushes
    # a stage takes 0.185 s for each of two microbatches; of two ranks with split backwards 0.245
    assert result.delayed.samples_per_second == pytest.approx(0.49 / 0.37 * result.choice.ranked[0].samples_per_second, rel=1e-4)
    assert delayed(3, schedules=("all",)).delayed is None
    assert delayed(1).delayed is None  # one stage has no bubble


def test_a_batch_of_too_many_microbatches_is_refused_with_the_limit():
    with pytest.raises(jpipe.InputError, match="no plan has a batch of 10000000 rows in at most 1,024 microbatches of 1, 2 rows"):
        search(profile(), TWO, 10_000_000, Request(), False, silent())


def test_the_advice_where_no_plan_has_the_batch_fits_the_request():
    def advice(sizes: tuple[int, int], batch: int, **options) -> str:
        layers = [{**layer.model_dump(), "at": layer.at[-2:]} for layer in profile().layers]
        sized = Profile(**profile().model_dump(exclude={"layers", "sizes"}), sizes=sizes, layers=layers)
        with pytest.raises(jpipe.InputError) as error:
            search(sized, TWO, batch, Request(**options), False, silent())
        return str(error.value)

    other = "other batches or numbers of devices"
    for schedules in ((), ("all",)):
        message = advice((2, 4), 5, schedules=schedules)
        assert message.startswith(
            "plan: no plan has a batch of 5 rows in microbatches of 2, 4 rows on 2 devices; use a multiple of 2 or 4, "
        )
        assert advice((1, 2), 10**7, schedules=schedules).endswith(f"; allow {other}")
        assert advice((1, 2), 10**7, schedules=schedules, max_delay=1).endswith(f"; allow a larger delay, {other}")
    assert advice((1, 2), 10**7, schedules=("gpipe",)).endswith("; allow other schedules, batches or numbers of devices")


def test_updates_between_agreements_that_do_not_fit_the_config_are_reported():
    config = PlanConfig(agree=Agreement(every=4, fragments=2))
    assert Request(agree=7).with_extras(config).extras.agree == Agreement(every=7, fragments=2)
    with pytest.raises(jpipe.InputError, match=r"--agree: every: expected greater than or equal to 1, found 0"):
        Request(agree=0).with_extras(config)


def test_a_plan_that_does_not_fit_when_compiled_gives_way_to_a_smaller_one_of_its_kind(fits):
    result, attempts = searched(TWO, dispatch=0.02), []
    best = result.choice.ranked[0].candidate
    assert best.rows == 2
    candidates = tuple(candidate for candidate in result.candidates if candidate.rows == 2 or candidate.kind == best.kind)
    tried = {key: one for key, one in result.tried.items() if one.candidate.rows == 2 or one.candidate.kind == best.kind}
    compiled = fits(lambda candidate: candidate.rows == 1)
    after = confirm(
        dataclasses.replace(result, candidates=candidates, tried=tried),
        parts(),
        of_this_machine(),
        lambda attempt: attempts.append(attempt.ranked.candidate),
    )
    first = after.choice.ranked[0]
    assert attempts == compiled[:-1]
    assert attempts
    assert all(candidate.rows == 2 for candidate in attempts)
    assert first is after.compiled[0].ranked
    assert first.candidate == compiled[-1]
    assert (first.candidate.kind, first.candidate.rows) == (best.kind, 1)
    assert not {ranked.candidate for ranked in after.choice.ranked} & set(attempts)
    assert set(attempts) <= set(after.tried)


def test_where_nothing_fits_when_compiled_the_missing_bytes_are_reported(fits):
    fits(lambda candidate: False)
    with pytest.raises(jpipe.InputError, match=r"stages of .* plans need too much memory(.|\n)*: stage 0 lacks 2 kB when compiled"):
        confirm(searched(TWO), parts(), of_this_machine(), lambda _: None)


@pytest.mark.parametrize(("memory", "near", "does"), [(1.15e9, True, True), (1.15e9, True, False), (1.0e9, False, True)])
def test_near_misses_are_compiled_if_they_would_be_faster(fits, memory, near, does, monkeypatch):
    monkeypatch.setattr(variants, "SAVING", 0)  # with a shared optimizer data parallelism would fit
    weights = 10**8  # a device of data parallelism holds 12 times that, one of two stages 8 times
    result = searched(Topology.flat(2, 1e12, memory=memory), weights)
    parallel = [candidate for candidate in result.candidates if candidate.depth == 1]
    assert parallel
    assert all(candidate.over is not None for candidate in parallel)
    assert all(ranked.candidate.depth == 2 for ranked in result.choice.ranked)
    compiled = fits(lambda candidate: candidate.depth == 2 or does)
    after = confirm(result, parts(), of_this_machine(), lambda *_: None)
    assert (compiled[0].depth == 1) == near
    first = after.choice.ranked[0].candidate
    assert first.depth == (1 if near and does else 2)
    assert first.over is None
    assert [ranked.candidate.kind for ranked in after.choice.ranked].count(first.kind) == 1
    assert any(after.tried.get(candidate) is after.compiled[0].ranked for candidate in result.candidates)


def test_nothing_is_compiled_if_no_plan_can_fit(fits):
    compiled = fits(lambda candidate: True)
    with pytest.raises(jpipe.InputError, match="no plan fits: nearest is"):
        confirm(searched(Topology.flat(2, 1e9, memory=1e6)), parts(), of_this_machine(), lambda *_: None)
    assert not compiled


class Alone(Team):
    """Process 0 of two, as far as it asks."""

    def run_on_all(self, work):
        return work()

    def from_first(self, what, work):
        return work()


def test_auto_leaves_no_process_idle(fits, monkeypatch, tiny):
    fits(lambda candidate: True)
    config = Config.model_validate(tiny)
    monkeypatch.setattr(Parts, "of", lambda *_: parts())
    monkeypatch.setattr(auto, "profile_together", lambda *_: profile())
    monkeypatch.setattr(auto, "cores_of", lambda *_: None)
    monkeypatch.setattr(auto, "local_topology", lambda cores: Topology.flat(7, 1e9))
    alone = Alone(None)
    assert len(auto.find_plan(config, silent(), alone).workers) < 7
    alone.processes = types.SimpleNamespace(waiting=lambda *_, **__: contextlib.nullcontext())
    with pytest.raises(jpipe.InputError, match=r"no plan has a batch of .* on all of 7 devices"):
        auto.find_plan(config, silent(), alone)


def test_several_processes_use_all_their_devices():
    with pytest.raises(jpipe.InputError, match="--devices: several processes use all their devices; leave it out"):
        prepare_devices(Request(devices=2), 2)
