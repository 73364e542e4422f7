"""Descriptions of a plan's meshes, and heads that a mesh does not divide."""

import contextlib
import re

import jax
import optax
import pytest

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train.assemble.meshes import device_kinds, has_meshes, mesh_words
from jpipe_train.config.config import model_class
from jpipe_train.losses.cross_entropy import loss

IDS = ["embed", "block_0", "block_1", "head"]


def plan_of(mesh, **fields):
    return jpipe.Plan.even(IDS, 2, "gpipe", 2, mesh=mesh, **fields)


@pytest.mark.parametrize(
    ("mesh", "fields", "words"),
    [
        (None, {}, "one device each"),
        ({"data": 2, "model": 4}, {}, "(data 2, model 4)"),
        ([{}, {"model": 2}], {}, "one device, (model 2)"),
        ({"data": 2}, {"fsdp": True}, "(data 2, fsdp)"),
        ({"model": 2}, {"replicas": 2, "shard_optimizer": True}, "(model 2), optimizer state shared by replicas"),
    ],
)
def test_meshes_in_words(mesh, fields, words):
    plan = plan_of(mesh, **fields)
    assert mesh_words(plan) == words
    assert has_meshes(plan) is (mesh is not None)


@pytest.mark.parametrize(
    ("model", "mesh", "fields", "message"),
    [
        ({"heads": 4}, {"model": 4}, {}, None),
        (
            {"heads": 4, "width": 96},
            {"model": 3},
            {},
            "model.heads: expected a multiple of 3, the size of the axis 'model' of the mesh of st",
        ),
        (
            {"heads": 4, "kv_heads": 2},
            [{}, {"model": 4}],
            {},
            "model.kv_heads: expected a multiple of 4, the size of the axis 'model' of the",
        ),
        ({"heads": 4, "kv_heads": 2}, {"model": 4}, {"rules": {"heads": None}}, None),
        ({"heads": 3, "width": 96}, {"data": 2}, {}, None),
        ({"target": "own:stack"}, {"model": 3}, {}, None),
        (
            {"experts": {"count": 4, "per_token": 2, "mlp_width": 8}},
            {"expert": 3},
            {},
            "model.experts.count: expected a multiple of 3, the size of the axis 'expert' of the mesh of stage 0, found 4; change one of",
        ),
    ],
)
def test_each_device_has_whole_heads(model, mesh, fields, message):
    with contextlib.nullcontext() if message is None else pytest.raises(jpipe.InputError, match=re.escape(message)):
        model_class(model)(**model).check_plan(plan_of(mesh, **fields))


def test_all_devices_of_the_meshes_count():
    stack = layers(ModelConfig(depth=2, width=8, heads=2, seq_len=8))
    pipe = jpipe.Pipeline(stack, plan_of([{"data": 2, "model": 2}, {}]), loss, optax.sgd(0.1))
    assert device_kinds(pipe) == [jax.devices()[0].device_kind] * 5
