"""Mistakes of the caller give one message: where, expected, found, what to change. No device is used."""

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pydantic
import pytest

import jpipe
from jpipe import DynamicLossScale, InputError, Pipeline, Plan, lower
from jpipe._arguments import checked_batch
from jpipe.errors import Problem, explain
from jpipe.plan import Agreement, Predicted
from jpipe.programs import StageCost
from jpipe.runtime import fit_costs
from tests.jpipe import models

STACK = models.plain_stack()
IDS = STACK.ids


def pipeline(loss=models.squares, **fields) -> Pipeline:
    return Pipeline(STACK, Plan.even(IDS, 2, "gpipe", 2, **fields), loss, models.momentum())


# Plans -----------------------------------------------------------------------------------------------------------------

GOOD = json.loads(Plan.even(IDS, 2, "pipedream_2bw", 2).to_json())


def without(key):
    return {k: v for k, v in GOOD.items() if k != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "pipedream_2wb"}, r"^plan\.json: schedule: unknown schedule 'pipedream_2wb'; did you mean 'pipedream_2bw'\?$"),
        ({"schedule": "xyz"}, r"^plan\.json: schedule: unknown schedule 'xyz'; known: 1f1b, 2bw, afab, auto_zero_bubble, "),
        ({"schedule": "\ud800"}, r"^plan\.json: schedule: unknown schedule '\\ud800'; known: 1f1b, 2bw, afab, auto_zero_bubble, "),
        ({"micro_batches": 4}, r"^plan\.json: unknown key 'micro_batches'; did you mean 'microbatches'\?$"),
        ({"microbatches": "4"}, r"^plan\.json: microbatches: expected a valid integer, found '4'$"),
        ({"microbatches": 0}, r"^plan\.json: microbatches: expected greater than or equal to 1, found 0$"),
        ({"microbatches": 1.5}, r"^plan\.json: microbatches: expected a valid integer, found 1\.5$"),
        ({"extra_in_flight": -1}, r"^plan\.json: extra_in_flight: expected greater than or equal to 0, found -1$"),
        (
            {"microbatches": 1},
            r"^plan\.json: the schedule 'pipedream_2bw' needs at least 2 microbatches for 2 stages, found microbatches 1; raise",
        ),
        (
            {"vertical_sync": True},
            r"vertical_sync: this is an option of the schedule 'pipedream', found schedule 'pipedream_2bw'; remove the option$",
        ),
        (
            {"schedule": "gpipe", "extra_in_flight": 1},
            r"extra_in_flight: expected 0, because the schedule 'gpipe' has no in-flight limit to raise, found 1$",
        ),
        ({"placement": [[0]]}, r"placement: expected \[1, 1\] devices for the stages, one for each replica, found \[1\]"),
        *(
            (
                {"offload": {"optimizer": value}},
                rf"^plan\.json: offload\.optimizer: expected 'all' or a list of stages counted from 0, found {text}$",
            )
            for value, text in (
                ([-1], r"\[-1\]"),
                (0, "0"),
                ("0", "'0'"),
                (True, "True"),
                (None, "None"),
                ("All", "'All'"),
                ({"0": 1}, r"\{'0': 1\}"),
            )
        ),
        *(
            ({"offload": {"optimizer": [value]}}, rf"^plan\.json: offload\.optimizer: expected .*, found \[{value!r}\]$")
            for value in (True, 0.0, "all")
        ),
        ({"stages": []}, r"^plan\.json: stages: expected at least 1 of them, found 0$"),
        ({"stages": 3}, r"^plan\.json: stages: expected .*, found 3$"),
        ({"stages": [{"layers": []}]}, r"^plan\.json: stages\.0\.layers: expected at least 1 of them, found 0$"),
        (
            {"stages": [{"layers": IDS, "replica": 2}]},
            r"^plan\.json: unknown key 'stages\.0\.replica'; did you mean 'stages\.0\.replicas'\?$",
        ),
        (
            {"stages": [{"layers": IDS[:1]}, {"layrs": IDS[1:]}]},
            r"^plan\.json: unknown key 'stages\.1\.layrs'; did you mean 'stages\.1\.layers'\?$",
        ),
        *(
            (
                {"stages": [{"layers": IDS, "replicas": replicas}], "placement": [[0]]},
                rf"^plan\.json: stages\.0\.replicas: expected a valid integer, found {replicas!r}$",
            )
            for replicas in (True, "1", 1.0)
        ),
        *(
            ({"placement": [[0], [number]]}, rf"^plan\.json: placement\.1\.0: expected .* integer.*, found {number!r}$")
            for number in (True, "1", 1.0)
        ),
        ({"microbatches": 10**10}, r"^plan\.json: microbatches: expected less than or equal to 1000000000, found 10000000000$"),
        ({"microbatches": float("nan")}, r"^plan\.json: microbatches: expected a valid integer, found nan$"),
        ({"stages": [{"layers": ["a", ""]}]}, r"^plan\.json: stages\.0\.layers: expected names of printable characters, found ''$"),
        (
            {"stages": [{"layers": ["\x1b[31m\n"]}]},
            r"^plan\.json: stages\.0\.layers: expected names of printable characters, found '\\x1b\[31m\\n'$",
        ),
        ({"stages": [{"replicas": 1}]}, r"^plan\.json: key 'stages\.0\.layers' is missing; add it$"),
        (
            {"stages": [{"layers": IDS, "recompute": "dots"}]},
            r"stages\.0\.recompute: unknown recomputation policy 'dots'; known: auto, dots_saveable, .*full, none, nothing_saveable$",
        ),
        (
            {"stages": [{"layers": ["layer0", "layer1"]}, {"layers": ["layer1"]}]},
            r"^plan\.json: layer 'layer1' is in stage 0 and again in stage 1; put every layer into one stage, once$",
        ),
    ],
)
def test_a_wrong_plan_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        Plan.from_json(json.dumps(GOOD | change), where="plan.json")


@pytest.mark.parametrize("key", ["schedule", "microbatches", "stages"])
def test_a_missing_key_is_named(key):
    with pytest.raises(InputError, match=rf"^plan: key '{key}' is missing; add it$"):
        Plan.from_json(json.dumps(without(key)))


def test_the_plan_itself_refuses_the_same():
    with pytest.raises(InputError, match=r"^unknown schedule 'gpip'; did you mean 'gpipe'\?$"):
        Plan.even(IDS, 2, "gpip", 2)
    with pytest.raises(InputError, match=r"^plan: unknown key 'microbatch'; did you mean 'microbatches'\?\n?"):
        Plan(schedule="gpipe", microbatches=2, stages=[{"layers": IDS}], microbatch=3)


def test_every_problem_has_a_line():
    with pytest.raises(InputError) as caught:
        Plan.from_json(json.dumps(without("schedule") | {"microbatches": -1, "stage": 1}))
    assert len(str(caught.value).splitlines()) == 3


TEXT = Plan.even(IDS, 2, "gpipe", 2).to_json()


@pytest.mark.parametrize("length", [0, 1, len(TEXT) // 2, len(TEXT) - 3])
def test_a_truncated_plan_is_refused(length):
    with pytest.raises(
        InputError, match=r"^my plan: expected a plan as JSON, found text that is not JSON or is cut off at line \d+, column \d+"
    ):
        Plan.from_json(TEXT[:length], where="my plan")


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("[1, 2]", "'list'"),
        ('"gpipe"', "'str'"),
        ("null", "'NoneType'"),
        ('{"name": "x"}', "None"),
        ('{"format": "jpipe-plan/2"}', "'jpipe-plan/2'"),
    ],
)
def test_foreign_json_is_refused(text, description):
    with pytest.raises(
        InputError, match=rf'^plan: expected a JSON object with "format": "jpipe-plan/1", found {description}; is this a plan of jpipe\?$'
    ):
        Plan.from_json(text)


def test_deeply_nested_json_is_refused():
    with pytest.raises(InputError, match=r"nested too deeply"):
        Plan.from_json("[" * 200_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace(": 2", ": " + "9" * 5000, 1), "a number of thousands of digits"),
        (json.dumps(GOOD | {"self": 1}), "unknown key 'self'"),
        (json.dumps(GOOD | {"extra_in_flight": 100_000}), "extra_in_flight: expected less than or equal to 64, found 100000"),
    ],
)
def test_odd_plans_are_refused_with_a_message(text, message):
    with pytest.raises(InputError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("twice", "message"),
    [
        ('"microbatches": 2', r"^plan: microbatches: expected a valid integer, found the key twice$"),
        ('"format": "jpipe-plan/1"', r"^plan: expected a JSON object with \"format\": \"jpipe-plan/1\", found the key twice;"),
        ('"replicas": 1', r"^plan: stages\.0\.replicas: expected a valid integer, found the key twice$"),
        ('"placement": null', r"^plan: placement: expected a valid tuple, found the key twice$"),
    ],
)
def test_a_duplicate_key_is_refused(twice, message):
    with pytest.raises(InputError, match=message):
        Plan.from_json(TEXT.replace(twice, f"{twice}, {twice}", 1))


def test_unprintable_characters_are_escaped_and_a_problem_keeps_its_line():
    assert str(InputError("a\nb\x1b[31m\u202eé →", "c\udcff")) == "a\\nb\\x1b[31m\\u202eé →\nc\\udcff"


def test_a_layer_above_names_the_place_and_what_to_change():
    error = InputError(Problem("", "plan", "links.activations", "a dtype", "7", "use fp8"), Problem("a sentence", "plan"), "a line")
    assert str(error) == "plan: links.activations: expected a dtype, found 7; use fp8\nplan: a sentence\na line"
    assert str(error.at("a.json")).splitlines() == [
        "a.json: links.activations: expected a dtype, found 7; use fp8",
        "a.json: a sentence",
        "a.json: a line",
    ]
    renamed = error.renamed({"plan.links": "my.links", "plan": "b.json"})
    assert str(renamed) == "my.links.activations: expected a dtype, found 7; use fp8\nb.json: a sentence\na line"
    assert str(InputError("lost", where="a", change="stop").with_change("")) == "a: lost"
    assert str(InputError(where="depth", expected="1 or more", found=0)) == "depth: expected 1 or more, found 0"


def test_errors_keep_their_class_attributes_and_fields():
    class Refusal(InputError):
        def __init__(self, step):
            super().__init__("no", where="step")
            self.step = step

    moved = Refusal(3).at("run")
    assert (type(moved), moved.step, str(moved), moved.args) == (Refusal, 3, "run: no", ("run: no",))
    copied = copy.copy(InputError(where="a", expected="b", found="c"))
    assert (copied.problems, str(copied.at("d"))) == ((Problem("", "a", "", "b", "c"),), "d: expected b, found c")


def test_validators_raise_errors_with_fields_whose_place_is_completed():
    class Inner(pydantic.BaseModel):
        size: int

        @pydantic.model_validator(mode="after")
        def _small(self):
            raise InputError(key="size", expected="less", found=self.size)

    class Outer(pydantic.BaseModel):
        inner: Inner

    with pytest.raises(pydantic.ValidationError) as caught:
        Outer(inner={"size": 3})
    assert str(explain(caught.value, Outer, "file")) == "file: inner: size: expected less, found 3"


def test_a_plan_survives_json():
    plan = models.cut(
        IDS, (1, 2, 1), schedule="pipedream", microbatches=3, recompute="full", vertical_sync=True, placement=((0,), (4,), (1,))
    )
    assert Plan.from_json(plan.to_json()) == plan


# A plan and a model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([["layer0", "layer1"], ["layer2"]], r"^plan: layer 'layer3' of the model is in no stage; add it to a stage$"),
        ([["layer0", "layer1"], ["layer2", "layer3", "layer44"]], r"^plan: layer 'layer44' is not in the model; did you mean 'layer\d'\?$"),
        (
            [["layer0", "layer2"], ["layer1", "layer3"]],
            r"^plan: the stages hold layer 'layer2' where the model has 'layer1'; keep the model's order$",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(stages, message):
    plan = Plan(schedule="gpipe", microbatches=2, stages=[{"layers": tuple(layers)} for layers in stages])
    with pytest.raises(InputError, match=message):
        Pipeline(STACK, plan, models.squares, models.momentum())


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_layers_are_refused(num_stages):
    with pytest.raises(InputError, match=rf"^plan: expected between 1 and 4 stages \(the number of layers\), found {num_stages}$"):
        Plan.even(IDS, num_stages, "gpipe", 2)


def test_too_few_microbatches_for_2bw_with_more_in_flight():
    with pytest.raises(InputError, match=r"needs at least 6 microbatches for 4 stages with extra_in_flight 1, found microbatches 5"):
        Plan.even(IDS, 4, "pipedream_2bw", 5, extra_in_flight=1)


def test_recomputation_for_each_stage_must_name_each():
    with pytest.raises(
        InputError, match=r"expected one recomputation policy for all stages or one for each of 2 stages, found a list of 3"
    ):
        Plan.even(IDS, 2, "gpipe", 2, recompute=["full"] * 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"microbatches": 4, "replicas": (3, 2)},
            r"^plan: microbatches: expected a multiple of 6, so that the replicas of each stage, \[3, 2\], share the microbatches evenly, "
            r"found 4; use 6",
        ),
        (
            {"microbatches": 2, "replicas": (2,)},
            r"^plan: expected one number of replicas for all stages or one for each of 2 stages, found a list of 1$",
        ),
        (
            {"microbatches": 2, "noam": True},
            r"^plan: the option noam no longer exists, found True; remove it: schedules already keep just enough "
            r"microbatches in flight",
        ),
        (
            {"microbatches": 2, "scale_learning_rate": True},
            r"^plan: the option scale_learning_rate no longer exists, found True; remove it: give each stage its own learning rate with",
        ),
        (
            {"microbatches": 2, "replicas": (2, 1), "vertical_sync": True, "update_every": "replicas"},
            r"^plan: vertical_sync needs stages that update together, found replicas \[2, 1\]",
        ),
        (
            {"microbatches": 2, "replicas": 2, "schedule": "pipedream_2bw"},
            r"needs at least 4 microbatches for 2 stages with replicas \[2, 2\], found microbatches 2; raise microbatches or use "
            r"fewer stages or replicas$",
        ),
    ],
)
def test_replicas_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Plan.even(IDS, **{"num_stages": 2, "schedule": "pipedream", **fields})


def test_devices_must_be_one_for_each_stage():
    pipe = Pipeline(STACK, pipeline().plan, models.squares, models.momentum(), devices=jax.devices()[:3])
    with pytest.raises(InputError, match=r"^devices: expected 2, one for each stage, found 3$"):
        pipe.init(jax.random.key(0), models.batches_of(1, 4)[0])


def test_a_placement_on_a_device_that_is_not_there_is_refused():
    with pytest.raises(
        InputError,
        match=r"^plan: placement: it names device 64, but there are only 8 \(0 to 7\); choose one of these\nworkers:\n  stage 0: w0\n",
    ):
        pipeline(placement=((0,), (64,))).init(jax.random.key(0), models.batches_of(1, 4)[0])


# Batches and losses ----------------------------------------------------------------------------------------------------

X = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X[:3], X[:3]), r"^batch: expected a number of rows divisible by 2 microbatches, found 3; change the batch size or microbatches$"),
        ((X[:0], X[:0]), r"^batch: expected a number of rows divisible by 2 microbatches, found 0"),
        (([[0.0] * 3] * 4, [[0.0] * 3] * 4), r"^batch: .*; make an array of a list of numbers with numpy\.asarray$"),
        (
            (X, X[:2]),
            r"^batch: expected arrays with the same number of rows \(first dim\), found \[0\] float32\[4, 3\], \[1\] float32\[2, 3\]$",
        ),
        (
            (X, np.float32(1)),
            r"^batch: expected arrays with the same number of rows \(first dim\), found \[0\] float32\[4, 3\], \[1\] float32\[\]$",
        ),
        (
            (X, 1.5),
            r"^batch: expected arrays with the same number of rows .*, found \[0\] float32\[4, 3\], \[1\] float; make an array of a list "
            r".*$",
        ),
        (
            (X, [1.0, 2.0]),
            r"^batch: expected arrays with the same number of rows .* \[1\]\[0\] float, \[1\]\[1\] float; make an array of a list .*$",
        ),
        ((X, "text"), r"^batch: expected arrays with the same number of rows .* \[1\] str$"),
    ],
)
def test_a_wrong_batch_is_refused(batch, message):
    with pytest.raises(InputError, match=message):
        pipeline().check(batch)


UNTYPED = {
    "pipe.check(x)": "batch: expected a tuple (inputs, labels), found ndarray",
    "pipe.check((x, x, x))": "batch: expected a tuple (inputs, labels), found 3 of them",
    "pipe.check((np.array(['a', 'b']), x))": (
        "batch: expected arrays of numbers, found [0] <U1[2], [1] float32[2, 3]; convert <U1 to numbers"
    ),
    "pipe.check((x, np.array([None, 1])))": (
        "batch: expected arrays of numbers, found [0] float32[2, 3], [1] object[2]; convert object to numbers"
    ),
    "pipe.step(5, (x, x))": "state: expected a jpipe.State, found int",
    "pipe.step(5, (x, x), observe=3)": "observe: expected a function of an Event, such as a Tracer or a Snapshot, found int",
    "pipe.drain(5, observe=3)": "observe: expected a function of an Event, such as a Tracer or a Snapshot, found int",
    "pipe.snapshot('3')": "snapshot: expected the number of a batch, 0 or more, found '3'",
    "pipe.snapshot(-1)": "snapshot: expected the number of a batch, 0 or more, found -1",
    "pipe.snapshot(3)": "snapshot: this pipeline has no run yet; call init or restore first",
    "checkpoints.save('runs', None)": "checkpoint: expected a jpipe.runtime.Snapshot, found NoneType; make one with pipe.snapshot(batch)",
    "checkpoints.save('runs', jpipe.runtime.Snapshot(plan, 1, {}), keep=0)": "keep: expected a number of checkpoints, 1 or more, found 0",
    "checkpoints.save(None, jpipe.runtime.Snapshot(plan, 1, {}))": "folder: expected the path of a run's folder, found NoneType",
    "checkpoints.load(None, 'runs', jax.random.key(0), (x, x))": "pipe: expected a jpipe.Pipeline, found NoneType",
    "checkpoints.load(pipe, None, jax.random.key(0), (x, x))": "folder: expected the path of a run's folder, found NoneType",
    "checkpoints.prune('runs', '3')": "keep: expected a number of checkpoints, 1 or more, found '3'",
    "pipe.init(jax.random.key(0), (x, x), params=3)": "params: expected a dict of parameters by layer id, found int",
    "LayerStack({3: abs})": "LayerStack: a layer id is a non-empty string, found 3",
    "LayerStack(abs)": (
        "LayerStack: expected a dict of layers by id, a list of layers or a Sequential, found builtin_function_or_method; "
        "give {'layer id': layer, …}"
    ),
    "LayerStack({'a': lambda rngs: None})": "layer 'a': its constructor returned NoneType, expected a flax.nnx.Module",
    "stack.specs(np.array(['a']))": "inputs: expected arrays of numbers, found <U1[1]",
    "Plan.even(stack, 1, 'gpipe', 1)": "plan: expected the layer ids in order, found LayerStack; give its ids, stack.ids",
    "Plan.even(stack.ids, '1', 'gpipe', 1)": "plan: num_stages: expected an integer, found '1'",
    "Plan.even(stack.ids, 1, 'gpipe', '1')": "plan: microbatches: expected a valid integer, found '1'",
    "Plan.even(stack.ids, 1, 'gpipe', 1, replicas=1.5)": "plan: replicas: expected one value for all stages or a list with one for each "
    "stage, found 1.5",
    "Plan.even(stack.ids, 1, 'auto_zero_bubble', 1, order='F0.0 B0.0')": (
        "plan: order: expected a list of texts, one for each rank, found 'F0.0 B0.0'; put it into a list"
    ),
    "Plan.from_json(3)": "plan: expected a plan as JSON text, found int",
    "Pipeline({'a': abs}, plan, loss, sgd)": "stack: expected a jpipe.LayerStack, found dict; wrap the layers in LayerStack(…)",
    "Pipeline(LayerStack({'a': abs}, carries_rows=True), Plan.even('a', 1, 'gpipe', 2, replicas=2), loss, sgd)": (
        "plan.replicas: expected 1 for each stage, because layers carry the state of each row from batch to batch, found 2; use more "
        "stages instead, or layers without such a state"
    ),
    "Pipeline(stack, {}, loss, sgd)": "plan: expected a jpipe.Plan, found dict; make one with Plan.even(stack.ids, …)",
    "Pipeline(stack, plan, 3, sgd)": "loss: expected a function (outputs, labels) -> (sum, weight), found int",
    "Pipeline(stack, plan, loss, sgd, devices=[0, 1])": (
        "devices: expected devices such as jax.devices()[0], found 0; give some of jax.devices()"
    ),
    "Pipeline(stack, plan, loss, sgd, devices=2)": "devices: expected a list of devices, found int; give some of jax.devices()",
    "jpipe.simulate(plan)": "simulate: expected a program, found Plan; give jpipe.lower(plan, batches)",
    "jpipe.simulate(jpipe.lower(plan, 1), [1])": "simulate: expected a list of jpipe.programs.StageCost as costs, found [1]",
    "jpipe.simulate(jpipe.lower(plan, 1), None, 3)": (
        "simulate: expected a jpipe.Link, or a function from two ranks to their link, found 3"
    ),
    "jpipe.simulate(jpipe.lower(plan, 1), overlap='sums')": (
        "simulate: overlap: expected one of 'none', 'transfers', 'transfers and sums', found 'sums'"
    ),
    **{
        f"jpipe.simulate(jpipe.lower(plan, 1), [jpipe.programs.StageCost({field}={value})])": (
            f"simulate: costs of stage 0: {field}: expected {expected}, found {value}"
        )
        for field, value, expected in (
            ("gathered", "5", "a tuple of numbers"),
            ("updated", "[1]", "a tuple of numbers"),
            ("forward", "(1.0, 2.0)", "a number of 0 or more"),
        )
    },
    "jpipe.lower(stack, 1)": "lower: expected a jpipe.Plan, found LayerStack; make one with Plan.even(…)",
    **{
        f"jpipe.schedules.greedy_order(plan, [jpipe.programs.StageCost()], limits={limits})": (
            f"greedy_order: limits: expected an integer, or one for each of 1 ranks, found {limits}; give at least [1]"
        )
        for limits in ("None", "'4'", "[2.5]", "[None]", "2.5")
    },
    "jpipe.lower(plan, '1')": "lower: expected integers, found start 0, begin 0, batches '1'",
}
CALLS = """
import jax, json, numpy as np, optax, sys
import jpipe
from jpipe import LayerStack, Pipeline, Plan, checkpoints
stack = LayerStack({"a": lambda x: x})
plan, loss, sgd = Plan.even(["a"], 1, "gpipe", 1), lambda y, labels: (y.sum(), 1.0), optax.sgd(0.1)
pipe = Pipeline(stack, plan, loss, sgd)
x = np.zeros((2, 3), np.float32)
for call in json.loads(sys.argv[1]):
    try:
        eval(call)
        print("no error")
    except jpipe.InputError as error:
        print(error)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_wrong_types_are_reported_without_type_checks_too():
    """The tests check types at run time but a user's program does not, so jpipe must report wrong types itself."""
    command = [sys.executable, "-c", CALLS, json.dumps(list(UNTYPED))]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(jpipe.__file__).parents[1])
    assert dict(zip(UNTYPED, result.stdout.splitlines(), strict=True)) == UNTYPED


def test_integers_may_be_those_of_numpy():
    expected = Plan.even(IDS, 2, "gpipe", 4, replicas=(1, 2), placement=[[0], [1, 2]])
    placement = [[np.int32(0)], [np.int64(1), np.uint8(2)]]
    for replicas in (np.array([1, 2]), [np.int64(1), np.int64(2)]):
        assert Plan.even(IDS, np.int64(2), "gpipe", np.int32(4), replicas=replicas, placement=placement) == expected
    assert json.loads(Plan.even(IDS, 2, "gpipe", 2, replicas=np.int64(1)).to_json())["stages"][0]["replicas"] == 1


def test_numbers_of_options_may_be_those_of_numpy():
    scale = SimpleNamespace(initial=np.float32(1024), growth_every=np.int32(7))
    DynamicLossScale.__post_init__(scale)
    assert json.dumps(vars(scale)) == '{"initial": 1024.0, "growth_every": 7}'
    outer = {"learning_rate": np.float32(0.5), "momentum": np.float16(0.25)}
    rare = Agreement(every=np.int64(4), delay=np.int8(2), mixing=np.float32(0.25), outer=outer, fragments=np.int64(2))
    assert json.loads(rare.model_dump_json()) == {
        **{"every": 4, "fragments": 2, "delay": 2, "mixing": 0.25, "bits": None},
        "outer": {"optimizer": "nesterov", "learning_rate": 0.5, "momentum": 0.25},
    }
    predicted = Predicted(batch_seconds=np.float32(0.5), bubble=np.float32(0.25), peak_bytes=(np.int64(2),), delay=np.int64(1))
    assert predicted == Predicted(batch_seconds=0.5, bubble=0.25, peak_bytes=(2,), delay=1.0)
    given = {"clip_global_norm": np.float64(0.5), "ema_decay": np.float32(0.5), "delay_correction": np.float32(0.5)}
    pipe = Pipeline(STACK, Plan.even(IDS, 1, "gpipe", 2), models.squares, models.momentum(), **given)
    assert [type(value) for value in (pipe.clip_global_norm, pipe.ema_decay, pipe.delay_factor)] == [float] * 3
    state = pipe.init(jax.random.key(0), (X, X))
    snapshot = pipe.snapshot(np.int64(1))
    for _ in range(2):
        state, _ = pipe.step(state, (X, X), observe=snapshot)
    pipe.drain(state, observe=snapshot)
    assert type(pipe.restore(jax.random.key(0), (X, X), snapshot.layers(), np.int64(1)).batch) is int
    for wrong in (True, np.bool_(True), np.float64(1.0), -1):
        with pytest.raises(InputError, match=r"^at: expected the number of a batch, 0 or more, found"):
            checked_batch("at", wrong)
    for wrong in (True, np.bool_(True), np.float64(3)):
        with pytest.raises(InputError, match="growth_every: expected a number of batches"):
            DynamicLossScale.__post_init__(SimpleNamespace(initial=2.0, growth_every=wrong))


def test_a_batch_of_another_shape_than_that_of_init_is_refused():
    pipe = pipeline()
    state = pipe.init(jax.random.key(0), (X, X))
    for other in ((np.zeros((8, 3), np.float32),) * 2, (X, X.astype(np.int32)), ({"x": X}, X)):
        with pytest.raises(
            InputError,
            match=r"^batch: expected microbatches like the shape given to init, \[0\] float32\[2, 3\], \[1\] float32\[2, 3\], found ",
        ):
            pipe.step(state, other)
    pipe.step(state, (X, X))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda y, labels: ((y - labels) ** 2).sum(),
            r"^loss: expected \(sum of the losses, weight\), two scalars, found float32\[\]; return losses\.sum\(\)",
        ),
        (
            lambda y, labels: ((y - labels) ** 2, 1.0),
            r"^loss: expected \(sum of the losses, weight\), two scalars, found \[0\] float32\[2, 3\], \[1\] ",
        ),
        (lambda y, labels: (y.sum(), 1.0, 2.0), r"^loss: expected \(sum of the losses, weight\), two scalars, found \[0\]"),
        (lambda y, labels: None, r"^loss: expected \(sum of the losses, weight\), two scalars, found nothing"),
        (
            lambda y, labels: (y @ labels, 1.0),
            r"^loss: the function does not take outputs float32\[2, 3\] of layer 'layer3' and labels float32\[2, 3\]; it raises TypeError",
        ),
        (lambda y: (y.sum(), 1.0), r"^loss: the function does not take outputs .* it raises TypeError: .*positional argument"),
    ],
)
def test_a_wrong_loss_is_refused(loss, message):
    with pytest.raises(InputError, match=message):
        pipeline(loss).check((X, X))


def test_nothing_runs_on_a_device_before_a_refusal():
    before = len(jax.live_arrays())
    with pytest.raises(InputError):
        pipeline().init(jax.random.key(0), (X[:3], X[:3]))
    assert len(jax.live_arrays()) <= before + 1  # the key


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"batches": 1, "begin": 2}, "lower: expected 0 ≤ start ≤ begin ≤ batches, found start 0, begin 2, batches 1"),
        ({"batches": 3, "begin": 1, "start": 2}, "found start 2, begin 1, batches 3"),
        ({"batches": -1}, "found start 0, begin 0, batches -1"),
    ],
)
def test_impossible_programs_are_refused(numbers, message):
    with pytest.raises(InputError, match=message):
        lower(Plan.even("abc", 2, "pipedream_2bw", 2), **numbers)


def test_costs_are_fitted_rank_by_rank():
    expected = "fit_costs: expected one cost for each of 1 stages and a timeline of 1 ranks, found 1 costs and 2 rows"
    with pytest.raises(InputError, match=expected):
        fit_costs([StageCost()], ((), ()))


@pytest.mark.parametrize("peaks", [[], [1], [1, 2, 3]], ids=len)
def test_a_prediction_must_have_every_stage(peaks):
    predicted = {"batch_seconds": 1.0, "bubble": 0.1, "peak_bytes": peaks}
    message = rf"plan: predicted.peak_bytes: expected one number for each of 2 stages, found {len(peaks)}; plan again$"
    with pytest.raises(jpipe.InputError, match=message):
        jpipe.Plan.even("ab", 2, "gpipe", 2, predicted=predicted)
    assert jpipe.Plan.even("ab", 2, "gpipe", 2, predicted=predicted | {"peak_bytes": [1, 2]}).predicted is not None


ONES = np.ones((2, 3), np.float32)


@functools.cache
def started():
    pipe = pipeline()
    return pipe, pipe.init(jax.random.key(0), (ONES, ONES))


class OnlyAShape:
    shape, ndim, dtype = (2, 3), 2, np.dtype("float32")


class Frame:
    """A table whose columns differ in dtype."""

    shape, ndim = (2, 3), 2

    def __getitem__(self, rows):
        return ONES[rows]


def deleted():
    array = jax.numpy.ones((2, 3))
    array.delete()
    return array


ODD_BATCHES = {
    "masked": (
        lambda: np.ma.masked_array(np.ones((2, 3), np.float32), mask=np.eye(2, 3)),
        r"expected .* found a masked array float32\[2, 3\].*filled",
    ),
    "random keys": (lambda: jax.random.split(jax.random.key(0), 2), r"expected arrays of numbers, found .*convert key<fry> to numbers"),
    "keys of several types": (lambda: {1: np.ones((2, 3)), "a": np.ones((2, 3))}, "expected dicts with keys that can be sorted"),
    "a table": (Frame, "expected arrays of numbers, found .*convert Frame to numbers"),
    "no rows": (OnlyAShape, "expected arrays with rows that can be read, found OnlyAShape"),
    "a spec": (lambda: jax.ShapeDtypeStruct((2, 3), np.float32), "expected arrays with rows that can be read, found ShapeDtypeStruct"),
    "deleted": (deleted, r"expected arrays, found float32\[2, 3\] that was deleted"),
}


@pytest.mark.parametrize(("inputs", "message"), ODD_BATCHES.values(), ids=ODD_BATCHES)
def test_a_batch_that_jax_rejects_is_refused(inputs, message):
    pipe, state = started()
    with pytest.raises(InputError, match=f"^batch: {message}"):
        pipe.step(state, (inputs(), ONES))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan.from_json(b"\xff"), "plan: expected a plan as JSON, found bytes that are not UTF-8 text"),
        (lambda: Plan.even("abc", True, "gpipe", 2), "plan: num_stages: expected an integer, found True"),
        (lambda: lower(Plan.even("abc", 1, "gpipe", 2), True), "lower: expected integers, .*batches True"),
        (lambda: jpipe.Link(-1), "Link: bandwidth: expected bytes per second above 0, found -1"),
        (lambda: jpipe.Link(float("nan")), "Link: bandwidth: .*found nan"),
        (lambda: jpipe.Link(1, -1), "Link: latency: expected seconds, 0 or more, found -1"),
        (lambda: jpipe.Link(1, float("nan")), "Link: latency: .*found nan"),
        (
            lambda: jpipe.simulate(lower(Plan.even("ab", 1, "gpipe", 2), 1), [StageCost(forward=float("nan"))]),
            "simulate: costs of stage 0: forward: expected a number of 0 or more, found nan",
        ),
        *(
            (
                lambda field=field, parts=parts: jpipe.simulate(
                    lower(Plan.even("ab", 1, "gpipe", 2, replicas=2, sum_parts=parts), 1), [StageCost(**field)]
                ),
                f"simulate: costs of stage 0: {next(iter(field))}: expected {message}$",
            )
            for field, parts, message in (
                ({"gathered": (1, 2)}, 1, r"a number for each part of the stage, 1 in all, found \(1, 2\)"),
                ({"gathered": (1,)}, 2, r"a number for each part of the stage, 2 in all, found \(1,\)"),
                ({"part_times": (1.0,)}, 2, r"a number for each part of the stage, 2 in all, found \(1\.0,\)"),
            )
        ),
        (
            lambda: jpipe.simulate(lower(Plan.even("ab", 2, "gpipe", 2), 1), link=lambda source, target: 5),
            "simulate: expected a function that gives a jpipe.Link, found 5 for rank 0 and 1$",
        ),
        (
            lambda: jpipe.simulate(lower(Plan.even("ab", 1, "gpipe", 2, offload={"optimizer": "all"}), 1), host=lambda rank: 5),
            "simulate: host: expected a function that gives a jpipe.Link, found 5 for rank 0$",
        ),
    ],
)
def test_impossible_numbers_are_refused(make, message):
    with pytest.raises(InputError, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda text: Plan.even("abc", 2, text, 2),
        lambda text: Plan.even("abc", 2, "gpipe", 2, split_backward=text),
        lambda text: Plan.even("abc", 2, "gpipe", 2, **{text: 1}),
        lambda text: jpipe.Precision(params=text),
        lambda text: jpipe.Precision(loss_scale=text),
        lambda text: jpipe.LayerStack({"a": lambda x: x}, ties=[jpipe.Tie((text, "w"), ("a", "b"))]),
        lambda text: Plan.from_json(json.dumps({"format": text})),
    ],
)
def test_a_long_value_is_shortened(make):
    for text in ("x" * 20_000, "x y\n" * 5_000):
        with pytest.raises(InputError) as caught:
            make(text)
        assert len(str(caught.value)) < 2_000


def test_many_problems_are_shortened():
    assert len(InputError(*("problem",) * 100_000).args) < 1_000
