"""The profile's format: a JSON round trip, stages summed from layers, and invalid profiles."""

import json

import pytest

import jpipe
from jpipe import InputError
from jpipe_planner.profile.profile import AtSize, LayerProfile, Profile


def layer(name, factor=1, **fields):
    at = tuple(
        AtSize(
            forward=0.5 * factor * rows,
            backward=1.0 * factor * rows,
            outputs=10 * rows,
            residuals={"none": 30 * rows, "full": 10 * rows},
            shared={"none": 4 * rows, "full": 10 * rows},
            temporary=7,
        )
        for rows in (1, 2)
    )
    return LayerProfile(**{"id": name, "weights": 100 * factor, "optimizer": 200 * factor, "update": 0.25, "at": at} | fields)


def profile(**fields):
    layers = (layer("a"), layer("b", 2), layer("c", 3))
    return Profile(
        **{"source": "measured", "sizes": (1, 2), "inputs": (10, 20), "labels": (1, 2), "dispatch": 0.125, "layers": layers} | fields
    )


def test_json_round_trip():
    assert Profile.from_json(profile().to_json()) == profile()


def test_gradients_are_as_large_as_weights_unless_the_profile_says_so():
    old = profile().to_json().replace('"accumulators": 100, ', "")
    assert "accumulators" in profile().to_json()
    assert [layer.accumulators for layer in Profile.from_json(old).layers] == [100, 200, 300]
    with_accumulators = profile(layers=(layer("a", accumulators=150),))
    plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=({"layers": ("a",)},))
    assert (with_accumulators.stage_costs(plan, 2)[0].weights, with_accumulators.stage_costs(plan, 2)[0].accumulators) == (100, 150)
    assert jpipe.programs.LayerCost(forward=1.0, backward=2.0, weights=7).summed == 7


def test_a_stage_is_the_sum_of_its_layers_and_what_neighbours_share_counts_once():
    plan = jpipe.Plan(
        schedule="gpipe",
        microbatches=2,
        stages=({"layers": ("a", "b")}, {"layers": ("c",), "recompute": "full"}),
    )
    first, second = profile().stage_costs(plan, 2)
    assert (first.forward, first.backward, first.update) == (3 + 0.125, 6 + 0.125, 0.5 + 0.125)
    assert (first.weights, first.optimizer, first.outputs, first.residuals) == (300, 600, 20, 60 + 60 - 8)
    assert (second.backward, second.residuals, second.labels) == (6 + 3 + 0.125, 20, 2)
    assert second.temporary == 7 + (60 - 20)  # what the forward inside of the backward makes again


def test_forward_and_backward_in_one_program_are_dispatched_once():
    stages = ({"layers": ("a",)}, {"layers": ("b", "c")})
    for schedule in ("pipedream_flush", "zb_h1"):
        plan = jpipe.Plan(schedule=schedule, microbatches=2, stages=stages)
        with_dispatch, without = (profile(dispatch=dispatch).stage_costs(plan, 2) for dispatch in (0.125, 0.0))
        added = [
            [getattr(a, name) - getattr(b, name) for name in ("forward", "backward")] for a, b in zip(with_dispatch, without, strict=True)
        ]
        assert added == [[0.125, 0.125], [0.0, 0.125]]
    plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=stages)
    assert profile().stage_costs(plan, 2)[1].forward == profile(dispatch=0.0).stage_costs(plan, 2)[1].forward + 0.125


def test_layers_of_another_model():
    profile().check_layers(("a", "b", "c"))
    with pytest.raises(InputError, match=r"^profile: layer 1 is 'b', the model has 'x' there; profile this model$"):
        profile().check_layers(("a", "x", "c"))
    with pytest.raises(InputError, match=r"^profile: layer 'c' is not in the model"):
        profile().check_layers(("a", "b"))
    with pytest.raises(InputError, match=r"^profile: layer 'd' of the model is not in the profile"):
        profile().check_layers(("a", "b", "c", "d"))


def changed(path, value):
    data = json.loads(profile().to_json())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "some.json: expected a profile as JSON, found text that is not JSON or is cut off at line 1, column 2"),
        ("[" * 100_000, "some.json: expected a profile as JSON, found text nested too deeply"),
        ("[]", 'some.json: expected a JSON object with "format": "jpipe-profile/1", found \'list\''),
        (changed(("format",), "jpipe-plan/1"), 'some.json: expected a JSON object with "format"'),
        (changed(("layers", 0, "at", 1, "forward"), float("nan")), "some.json: layers.0.at.1.forward: expected a finite number, found nan"),
        (changed(("layers", 0, "at", 1, "backward"), -1), "some.json: layers.0.at.1.backward: expected"),
        (changed(("layers", 2, "weights"), -5), "some.json: layers.2.weights: expected"),
        (changed(("layers", 1, "id"), "a"), "some.json: layer 'a' occurs twice"),
        (changed(("layers", 1, "at"), []), "some.json: layer 'b': expected costs for each of 2 sizes, found 0"),
        (
            changed(("layers", 1, "at", 0, "residuals"), {"full": 1}),
            "some.json: layer 'b', 1 rows: expected residuals for the policy 'none'",
        ),
        (changed(("sizes",), [2, 1]), "some.json: sizes: expected ascending microbatch sizes, found [2, 1]"),
        (changed(("inputs",), [1]), "some.json: inputs: expected a number for each of 2 sizes, found 1"),
        (changed(("layer",), []), "some.json: unknown key 'layer'; did you mean 'layers'?"),
        (changed(("layers",), []), "some.json: layers: expected at least 1 of them, found 0"),
    ],
)
def test_an_invalid_profile(text, message):
    with pytest.raises(InputError) as caught:
        Profile.from_json(text, where="some.json")
    assert str(caught.value).startswith(message)


def test_a_profile_without_times_is_refused():
    data = json.loads(profile().to_json())
    for each in data["layers"]:
        each["at"][1] |= {"forward": 0.0, "backward": 0.0}
    with pytest.raises(InputError, match="all times at microbatches of size 2 are zero; profile again"):
        Profile.from_json(json.dumps(data))
