"""Layers on meshes: shares of bytes and work, seconds of sums and gathers, and the possible meshes."""

import math
import re

import pytest

import jpipe
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile, SharedProfile
from jpipe_planner.profile.sharded import NO_MESH, Degrees, Meshes, mesh_refusal, possible_degrees, shard_profile

HALF = {"weights": 0.5, "compute": 0.5, "outputs": 0.0, "residuals": {"none": 0.5, "full": 0.0}, "divides": 12}
SUMS = {"reduced": 800.0, "reductions": 2}


def profile(sizes=(2, 4), **tensor) -> Profile:
    """Return a profile of two equal layers, half of which can be sharded."""
    at = [
        {"forward": 8.0 * n, "backward": 16.0 * n, "outputs": 1000 * n, "residuals": {"none": 4000 * n, "full": 1000 * n}, "temporary": 80}
        for n in sizes
    ]
    layer = {"weights": 1600, "accumulators": 3200, "optimizer": 4800, "update": 4.0, "at": at, "tensor": {**HALF, **tensor}}
    layers = [{"id": name, **layer} for name in "ab"]
    return Profile(source="analytic", sizes=sizes, inputs=[8 * n for n in sizes], labels=[8 * n for n in sizes], layers=layers)


SERVERS = Topology(levels=({"count": 8, "bandwidth": 1000.0, "latency": 0.25}, {"count": 2, "bandwidth": 800.0, "latency": 1.0}))


def test_a_device_of_a_mesh_has_a_share_of_what_is_sharded():
    layer = shard_profile(profile(), Degrees(model=4), SERVERS).layers[0]
    share = 0.5 + 0.5 / 4
    assert (layer.weights, layer.accumulators, layer.optimizer) == (1600 * share, 3200 * share, 4800 * share)
    assert layer.update == 4.0 * share
    at = layer.at[0]
    assert (at.forward, at.backward, at.backward_weight) == (16 * share, 32 * share, 16 * share)
    assert at.residuals == {"none": 8000 * share, "full": 2000}
    assert at.outputs == 2000
    assert at.temporary == 80 * share


def test_the_rows_are_sharded_over_data_and_sizes_that_cannot_be_are_left_out():
    sharded = shard_profile(profile(sizes=(2, 3, 4)), Degrees(data=2), SERVERS)
    assert sharded.sizes == (2, 4)
    assert sharded.inputs == (8, 16)
    layer = sharded.layers[0]
    assert (layer.weights, layer.optimizer) == (1600, 4800)
    assert (layer.at[0].forward, layer.at[0].outputs, layer.at[0].residuals["none"]) == (8.0, 1000, 4000)
    assert layer.update == pytest.approx(4.0 + 2 * (3200 / 2 / 1000 + 0.25))  # and the sum of the gradients in a ring
    assert layer.at[0].backward == 16.0


def test_a_layer_takes_the_sums_of_its_partial_products_longer():
    plain, summed = (shard_profile(profile(**fields), Degrees(model=4), SERVERS).layers[0].at[0] for fields in ({}, SUMS))
    ring = 2 * 3 / 4 * 1600 / 1000 + 2 * 2 * 3 * 0.25  # 800 bytes for each of two rows, in two sums
    assert summed.forward == pytest.approx(plain.forward + ring)
    assert summed.backward == pytest.approx(plain.backward + ring)
    assert plain.in_one_program == pytest.approx(plain.forward + plain.backward)
    assert summed.in_one_program == pytest.approx(summed.forward + summed.backward)


def test_a_device_has_its_share_of_a_forward_and_a_backward_in_one_program():
    at = profile().layers[0].at[0].model_copy(update={"forward_backward": 40.0})
    layer = profile(**SUMS).layers[0]
    measured = profile().model_copy(update={"layers": (layer.model_copy(update={"at": (at, *layer.at[1:])}), layer)})
    sharded = shard_profile(measured, Degrees(model=4), SERVERS).layers[0].at[0]
    sums = sharded.forward + sharded.backward - (at.forward + at.backward) * (0.5 + 0.5 / 4)
    assert sharded.forward_backward == pytest.approx(40 * (0.5 + 0.5 / 4) + sums)
    assert sums > 0


def test_across_servers_sums_have_the_links_between_them():
    inside, across = (shard_profile(profile(**{**SUMS, "divides": 16}), Degrees(model=n), SERVERS).layers[0].at[0] for n in (8, 16))
    work = [16 * (0.5 + 0.5 / n) for n in (8, 16)]
    assert inside.forward - work[0] == pytest.approx(2 * 7 / 8 * 1600 / 1000 + 2 * 2 * 7 * 0.25)
    assert across.forward - work[1] == pytest.approx(2 * 15 / 16 * 1600 / 100 + 2 * 2 * 15 * 1.0)


def test_fsdp_keeps_a_share_of_the_weights_and_gathers_them_for_each_microbatch():
    plain, sharded = (shard_profile(profile(), Degrees(data=2, fsdp=fsdp), SERVERS).layers[0] for fsdp in (False, True))
    assert (sharded.weights, sharded.accumulators, sharded.optimizer) == (800, 1600, 2400)
    gather, scatter = 1600 / 2 / 1000 + 0.25, 3200 / 2 / 1000 + 0.25
    assert sharded.at[0].forward == pytest.approx(plain.at[0].forward + gather)
    assert sharded.at[0].backward == pytest.approx(plain.at[0].backward + gather + scatter)  # for each microbatch
    assert sharded.update == 2.0
    assert sharded.at[0].temporary == 40 + 800 + 1600  # the other half of weights and gradients


def test_a_shared_parameter_is_sharded_as_its_layers_are():
    tied = profile().model_copy(update={"shared": (SharedProfile(layers=("a", "b"), weights=160, accumulators=320, optimizer=480),)})
    one = shard_profile(tied, Degrees(data=2, model=4, fsdp=True), SERVERS).shared[0]
    assert (one.weights, one.accumulators, one.optimizer) == (50, 100, 150)


def test_no_mesh_is_the_profile_itself():
    unsharded = profile()
    assert Meshes(unsharded, SERVERS).of(NO_MESH) == (unsharded, SERVERS)
    assert shard_profile(unsharded, NO_MESH, SERVERS).costs(2)["a"].forward == unsharded.costs(2)["a"].forward


def test_meshes_are_inside_a_server_and_divide_heads():
    degrees = possible_degrees(profile(), SERVERS)  # dims have a common divisor of 12
    assert degrees[0] == NO_MESH
    assert set(degrees[1:]) == {
        Degrees(2, 1, True),
        Degrees(4, 1, True),
        Degrees(1, 2),
        Degrees(2, 2, True),
        Degrees(4, 2, True),
        Degrees(1, 4),
        Degrees(2, 4, True),
    }
    assert Degrees(model=8) in possible_degrees(profile(divides=64), SERVERS)
    slow = Topology(levels=SERVERS.levels, differing=[{"devices": "0-1", "speed": 0.5}])  # a mesh has equal devices
    assert {degrees.size for degrees in possible_degrees(profile(), slow)} == {1, 2}


def test_there_are_no_meshes_where_topology_or_profile_do_not_allow_them():
    unknown = profile().model_copy(update={"layers": tuple(one.model_copy(update={"tensor": None}) for one in profile().layers)})
    assert possible_degrees(unknown, SERVERS) == (NO_MESH,)
    assert possible_degrees(profile(), Topology.flat(1, 1e9)) == (NO_MESH,)
    assert "does not say" in mesh_refusal(unknown, Degrees(model=2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("none", NO_MESH), ("model=4", Degrees(model=4)), ("data=2, model=4,fsdp", Degrees(2, 4, True)), ("data=8", Degrees(8))],
)
def test_meshes_are_read_from_text(text, expected):
    assert Degrees.read(text) == expected


@pytest.mark.parametrize(
    "text", ["", "4", "model=0", "model=-2", "model=2,model=4", "tensor=2", "model=2.5", "none,model=2", "data=1,fsdp", "fsdp"]
)
def test_an_invalid_mesh_is_refused(text):
    with pytest.raises(jpipe.InputError, match="--mesh: "):
        Degrees.read(text)


@pytest.mark.parametrize(
    ("degrees", "why"),
    [(Degrees(model=5), "divides 12 and .* layer 'a' shards .* found 5"), (Degrees(data=3), "one of the microbatch sizes, 2, 4, found 3")],
)
def test_a_mesh_that_does_not_fit_the_layers_is_explained(degrees, why):
    assert re.search(why, mesh_refusal(profile(), degrees))
    assert not mesh_refusal(profile(), Degrees(model=4))
    assert "logical axis" in mesh_refusal(profile(divides=0), Degrees(model=2))


MIXTURE = {"experts": 8, "of_experts": 0.75, "exchanged": 600.0, "chosen": {"none": 0.25, "full": 0.0}, "divides": 0, "compute": 0.0}


def test_a_device_has_some_experts_of_a_mixture_and_rows_of_all_for_them():
    plain = {**MIXTURE, "weights": 0.0, "residuals": {}}
    layer = shard_profile(profile(**plain), Degrees(data=2, expert=2), SERVERS).layers[0]
    share = 0.25 + 0.75 / 2
    assert (layer.weights, layer.accumulators, layer.optimizer) == (1600 * share, 3200 * share, 4800 * share)
    copied = 2 * (0.5 * 3200 * 0.25 / 1000 + 0.25)  # gradients of what has copies, over data or over expert
    assert layer.update == pytest.approx(4.0 * share + 2 * copied)
    at = layer.at[0]  # 4 rows
    assert (at.outputs, at.residuals) == (1000, {"none": 16000 * (0.75 / 4 + 0.25 / 2), "full": 1000})
    exchange = 2 * (0.5 * 600 * 4 / 2 / 1000 + 0.25)  # gathered and scattered over one link
    assert at.forward == 32 / 4 + exchange
    gradients = 2 * (0.5 * 3200 * 0.75 / 2 / 1000 + 0.25)  # of experts, over data
    assert at.backward == pytest.approx(64 / 4 + exchange + gradients)
    whole, dense = (shard_profile(profile(**{**plain, **other}), Degrees(data=2), SERVERS).layers[0] for other in ({}, {"of_experts": 0.0}))
    assert (whole.update, whole.at[0].backward) == (dense.update, dense.at[0].backward)  # added up once per update, as other weights
    on_gpus = Topology(levels=SERVERS.levels, device={"target": "h100-80gb"})
    shares = {k: 1 - math.comb(4, k) / math.comb(8, k) for k in (1, 2, 5)} | {0: 1.0}  # of the tokens, some chosen expert is on the other
    for per_token, sent in shares.items():
        at = shard_profile(profile(**plain, per_token=per_token), Degrees(data=2, expert=2), on_gpus).layers[0].at[0]
        assert at.forward == pytest.approx(32 / 4 + 2 * (sent * 0.5 * 600 * 4 / 2 / 1000 + 0.25))
    assert {degrees.expert for degrees in possible_degrees(profile(**plain), SERVERS)} == {1, 2, 4}  # 4 rows at most
    assert "no experts" in mesh_refusal(profile(), Degrees(expert=2))
    assert "divides the 8 experts of layer 'a', found 3" in mesh_refusal(profile(**plain), Degrees(expert=3))
    assert "data times expert that divides" in mesh_refusal(profile(**plain), Degrees(4, expert=2))
    assert Degrees.read("data=2,expert=4") == Degrees(2, expert=4)
    assert Degrees(2, 2, expert=4).mesh == {"data": 2, "expert": 4, "model": 2}
