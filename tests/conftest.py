"""Fixtures and hooks of all tests: eight devices on any machine, strict promotion of dtypes and ranks, types checked at run time."""

import collections
import copy
import functools
import gc
import os
import pathlib
import re
import signal
import types
from typing import Protocol

import jax
import pytest
from beartype import BeartypeConf
from beartype._decor._nontype import decornontype
from beartype.claw import beartype_packages
from hypothesis.internal.conjecture import providers
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook

from tests import thinning
from tests.packages import PACKAGES, module_name
from tests.pairs import seeds

jax.config.update("jax_num_cpu_devices", 8)
# No silent widening and no silent broadcasting in our code. Optax's own Adam mixes int and float: jpipe allows that to optax alone.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests send these signals to programs that they start; under nohup, or in the background of a script, those would ignore them.
for number, usual in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no test reaches the Hub, nor do programs that it starts
# No test cuts the power: what is written need not be on the disk, for which each test of a run would wait a hundred times.
os.fsync = lambda number: os.fstat(number if isinstance(number, int) else number.fileno()) and None
# Hypothesis would read the source of all modules, for some seconds in each worker, to try the constants that they have.
providers._get_local_constants = lambda: providers._local_constants
# The packages are imported from here on, with every annotation checked at each call. Shapes are compared between the arguments of a call
# only in modules that name shapes: it takes some tenths of a millisecond a call, too much for the searches.
SHAPED = [module_name(path) for folder in PACKAGES.values() for path in folder.rglob("*.py") if "jaxtyping" in path.read_text("utf-8")]
beartype_packages([*PACKAGES], conf=BeartypeConf(is_pep484_tower=True))  # an int will do for a float, as for mypy
install_import_hook(SHAPED, "beartype.beartype")
# A function inside of another one would get new checks at each call of that one, which took a tenth of the time of all tests.
_with_checks, _checked = decornontype.beartype_func, {}


def _with_checks_once(func, conf, func_wrapper=None, **options):
    if func_wrapper is not None or any(options.values()) or "<locals>" not in func.__qualname__:
        return _with_checks(func, conf, func_wrapper, **options)
    annotations, checked = _checked.get((func.__code__, conf), (None, None))
    if annotations == func.__annotations__:
        return _checking(checked, func) if checked else func
    checked = _with_checks(func, conf)
    if checked is func:  # its annotations allow everything
        _checked[func.__code__, conf] = func.__annotations__, None
    elif {"__beartype_func", "__beartype_call_curr"} <= {*(checked.__kwdefaults__ or ())}:
        _checked[func.__code__, conf] = func.__annotations__, _checking(checked, None)  # which keeps nothing alive
    return checked


def _checking(checked, func):
    again = types.FunctionType(checked.__code__, checked.__globals__, None, checked.__defaults__, checked.__closure__)
    call = copy.copy(checked.__kwdefaults__["__beartype_call_curr"])
    call.decoratee = func
    again.__kwdefaults__ = checked.__kwdefaults__ | {"__beartype_func": func, "__beartype_call_curr": call}
    return functools.update_wrapper(again, func)


decornontype.beartype_func = _with_checks_once
# Python 3.11 reads all members of an object, and computes its properties, at each check against a protocol, which took a quarter of the
# time of all tests. For the packages' own classes and protocols, a check that succeeds once for a class is not repeated.
_has_all_members, _known = type(Protocol).__instancecheck__, set()


def _has_all_members_once(protocol, value):
    if (protocol, type(value)) in _known:
        return True
    result = _has_all_members(protocol, value)
    if result and {protocol.__module__.partition(".")[0], type(value).__module__.partition(".")[0]} <= {*PACKAGES}:
        _known.add((protocol, type(value)))
    return result


type(Protocol).__instancecheck__ = _has_all_members_once


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Cache compiled programs for all workers of a session, or for all sessions that share the folder JPIPE_TEST_CACHE."""
    session = tmp_path_factory.getbasetemp()
    of_session = session.parent if "PYTEST_XDIST_WORKER" in os.environ else session  # shared by all its workers
    shared = pathlib.Path(os.environ.get("JPIPE_TEST_CACHE") or of_session)
    os.environ["XDG_CACHE_HOME"] = str(shared)  # of programs that the tests start; the user's own cache stays as it is
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session", autouse=True)
def traced_once(compiled_once):
    """Trace equal stages once in a worker."""
    from tests import sharing  # only here: the packages that it imports are to be checked

    with pytest.MonkeyPatch.context() as patch:
        sharing.shared(patch)
        yield


_compiled: list[str] = []  # since the last check
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: "backend_compile" in event and _compiled.append(event))


@pytest.fixture(autouse=True)
def not_too_many_programs(traced_once):
    """Drop the shared programs when there are too many; checked after a few hundred more, because the check takes tens of milliseconds."""
    from tests import sharing

    if len(_compiled) > 200:
        _compiled.clear()
        sharing.forget_if_full()


@pytest.fixture
def nothing_shared(traced_once, monkeypatch):
    """Turn sharing off in a test that checks what is traced, compiled or read from the cache."""
    from tests import sharing

    monkeypatch.setattr(sharing, "enabled", False)


NUMBERS = (
    *("jpipe/model/", "jpipe/runtime/", "jpipe/stages/", "jpipe/test_pipeline.py", "jpipe/weights/", "jpipe/capabilities/"),
    *("lm/generate/test_decoder.py", "lm/checkpoint/test_huggingface.py", "lm/models/", "train/losses/"),
)
# What optimizations of XLA could change there, by the names of tests: whether two programs compute equal numbers, what programs hold and
# move, and how often they compute something. `make test-all` compiles the tests of everything else, too, like the programs of users.
OPTIMIZATION_MATTERS = re.compile(
    r"bit_for_bit|_equals_|_equal_(the|one|optax|those)|test_equals|test_numbers|equal_results|is_equal_where|same_bits|stays_equal"
    r"|no_(other_)?(bit|number)|placement_does|depend_on_the_(cut|number)|rule_applied|summed|always_zero|mix_rows|nan_of_a_later"
    r"|as_with_flax|computes?_what|chunks_give|logits_(are|loss)|learn|pipeline_trains|runs_from_python|tokens_are|resumes_under_any"
    r"|test_halves|computed_twice|run_once|advance_once|measured|gathered|no_buffer_holds|stores_no_logits|memory_of_the|survive_later"
    r"|do_not_vanish"
)
# These compile many stages of kinds that another test compiles with all optimizations, or each operation by itself.
SAME_KINDS_OF_STAGES = re.compile(
    r"uneven_cuts|eight_to_twelve_stages|measured_peak|processes_read_their|what_transformers_learns|learns_the_same_with_chunks|as_one_stage"
    r"|initial_weights_do_not|layers_compute_what|compute_what_a_loop|a_shared_optimizer_equal|chunks_on_meshes|rates_of_their_own"
    r"|clipping_by_the_global_norm_equals|whole_tree_with_replicas|copies_of_a_shared_parameter_stay|by_layer_equal_optax"
    r"|(agreement|correction|frozen|links)\.py::test_a_(mesh_changes|restored_run|run_from_a_snapshot)"
    r"|steps_equal_those_of_the_model_without_stages|buckets\.py::test_every_schedule_equals"
)


# Where only tests with one of these marks are asked for, files without one of these words have none: importing them takes a minute.
WORDS = {"slow": ("slow", "thinned", "exhaustive"), "oldest": ("oldest",)}


def pytest_ignore_collect(collection_path, config):
    """Leave out the files that have no test with the first mark of `-m`, where all chosen tests have it."""
    first, *more = config.option.markexpr.split() or [""]
    if "or" in more or not collection_path.name.startswith("test_"):
        return None
    if first == "numbers":
        name = collection_path.relative_to(pathlib.Path(__file__).parent).as_posix()
        return not name.startswith(tuple(start.partition("::")[0] for start in NUMBERS)) or None
    if first in WORDS:
        text = collection_path.read_text("utf-8")
        return not any(word in text for word in WORDS[first]) or None
    return None


PART = pytest.StashKey[tuple[int, str]]()
PAIRS = pytest.StashKey[tuple[str, str]]()
NEVER_RUN = pytest.StashKey[dict[str, list[str]]]()


def pytest_configure(config):
    """Choose the part of ten that runs, and the seed of the pairs, for all workers: a commit in the meantime changes nothing.

    Say at once that no test matches `-k`, where a word of it occurs nowhere: importing all tests to find that out takes minutes.
    """
    config.stash[PART] = part, _ = thinning.part_of_commit()
    os.environ[thinning.VARIABLE] = str(part)
    config.stash[PAIRS] = seed, _ = seeds.seed()
    os.environ[seeds.VARIABLE] = seed
    keywords, in_worker = config.option.keyword, hasattr(config, "workerinput")
    if not keywords or in_worker or (unknown := unknown_word(keywords)) is None:
        return
    raise pytest.UsageError(f"nothing matches -k '{keywords}': '{unknown}' is in no test and in nothing that is tested; correct it")


def unknown_word(keywords: str) -> str | None:
    """Return a word of the expression of `-k` without which no test matches it, and that occurs in no Python file; None without one.

    Names of tests are made of words of tests, and of what these find in the packages, such as the names of schedules.
    """
    words = re.findall(r"[^\W\d_]\w{3,}", keywords)
    if {"not", "or"} & {*re.findall(r"\w+", keywords)}:
        return None
    root = pathlib.Path(__file__).parents[1]
    files = [file for folder in ("tests", "examples", "benchmarks", "docs", *PACKAGES.values()) for file in (root / folder).rglob("*.py")]
    text = "\n".join([*map(str, files), *(file.read_text("utf-8") for file in files)]).lower()
    return next((word for word in words if word.lower() not in text), None)


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Say why nothing ran."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        chosen = " and ".join(
            f"{option} '{value}'" for option, value in (("-k", config.option.keyword), ("-m", config.option.markexpr)) if value
        )
        terminalreporter.write_line(
            f"nothing matches {chosen or 'these arguments'}: no test ran; slow tests are in make test-slow and test-all"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage while tests are imported, nor look for it afterwards in what was imported, millions of objects."""
    gc.disable()
    result = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20)  # JAX makes many objects that live on: to look for garbage ten times as often takes longer
    return result


def pytest_report_header(config):
    """Say which part of ten runs, which pairs are drawn, and how to repeat both."""
    (part, source), (seed, source_of_seed) = config.stash[PART], config.stash[PAIRS]
    return [
        f"thinned tests: part {part} of 0 to {thinning.PARTS - 1}, by {source}; {thinning.VARIABLE}={part} repeats it",
        f"random pairs: seed {seed}, by {source_of_seed}; {seeds.VARIABLE}={seed} repeats them",
    ]


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """Mark all but a few combinations of each `thinned` test `slow`, and most of these `exhaustive`; see pyproject.toml.

    Slow tests take turns: `make test-slow` runs half of them, and the other half at the next commit; invariants and other libraries do not.
    Of a fifth of the tests about numbers, mark the first combination that `make test` runs `numbers`, or else the first that
    `make test-slow` runs.
    """
    part, _ = config.stash[PART]
    never_run = config.stash[NEVER_RUN] = {}
    matrices = collections.defaultdict(list)
    for item in items:
        matrices[item.nodeid.split("[")[0]].append(item)
    for name, cases in matrices.items():
        is_invariant = name in thinning.invariants()
        if is_invariant:
            never_run[name] = thinning.never_run(cases, every=True)
        for item, level in zip(cases, thinning.levels(cases, part, every=is_invariant), strict=True):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "exhaustive"]
            always = is_invariant or any(map(item.get_closest_marker, ("oldest", "targets")))
            if level == thinning.SLOW and not always and not thinning.is_due(name, part, 2):
                level = thinning.ALL
            for mark in ("slow", "exhaustive")[:level]:
                item.add_marker(mark)
        is_numbers = name.removeprefix("tests/").startswith(NUMBERS) and OPTIMIZATION_MATTERS.search(name)
        if is_numbers and not SAME_KINDS_OF_STAGES.search(name) and thinning.is_due(name, part, 5):
            min(cases, key=lambda item: [*map(bool, map(item.get_closest_marker, ("exhaustive", "slow")))]).add_marker("numbers")


@pytest.fixture
def two_by_two():
    """Register a schedule for the length of a test."""
    from jpipe import schedules
    from tests.two_by_two import TWO_BY_TWO

    yield schedules.register(TWO_BY_TWO)
    del schedules._BY_NAME[TWO_BY_TWO.name]
