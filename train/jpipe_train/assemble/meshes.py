"""The meshes of a plan's stages: their description, their devices, and a check that they divide heads and experts."""

import jpipe
from jpipe import InputError
from jpipe.plan import mesh_rules
from jpipe_lm.config.model_config import ModelConfig


def has_meshes(plan: jpipe.Plan) -> bool:
    """Return whether a stage has a mesh."""
    return any(stage.mesh for stage in plan.stages)


def mesh_words(plan: jpipe.Plan) -> str:
    """Return a description such as `(data 2, model 2)`, `(model 2), one device` or `one device each`."""
    if not has_meshes(plan):
        return "one device each"
    descriptions = [_words(stage) for stage in plan.stages]
    shared = ", optimizer state shared by replicas" if plan.shard_optimizer else ""
    return (descriptions[0] if len(set(descriptions)) == 1 else ", ".join(descriptions)) + shared


def device_kinds(pipe: jpipe.Pipeline) -> list[str]:
    """Return JAX's name for the kind of each device of the run, over all processes."""
    return [device.device_kind for device in dict.fromkeys(device for place in pipe.places for device in place.devices)]


def check_heads(model: ModelConfig, plan: jpipe.Plan) -> None:
    """Check that a built-in model's attention heads are not cut between devices, and that all devices have equally many experts.

    The library itself checks the dimensions of parameters.

    Raises:
        InputError: a mesh does not divide the heads or the experts.
    """
    if model.target is not None:
        return
    rules = mesh_rules(plan)
    for s, stage in enumerate(plan.stages):
        if not any(layer_id.startswith("block_") for layer_id in stage.layers):
            continue
        # Queries, keys and values share one kernel, with the rule of "heads".
        counts = [("heads", "heads", model.heads), ("kv_heads", "heads", model.kv_heads_used)]
        counts += [] if model.experts is None else [("experts.count", "expert", model.experts.count)]
        for key, logical, count in counts:
            axis = rules[logical]
            degree = 1 if axis is None else stage.mesh.get(axis, 1)
            if count % degree:
                what = "heads" if logical == "heads" else "experts"
                raise InputError(
                    f"model.{key}: expected a multiple of {degree}, the size of the axis '{axis}' of the mesh of stage {s}, found {count}; "
                    f"change one of them, or leave {what} whole: plan.rules={{{logical}: null}}"
                )


def _words(stage: jpipe.Stage) -> str:
    sizes = ", ".join(f"{axis} {size}" for axis, size in stage.mesh.items())
    return f"({sizes}{', fsdp' if stage.fsdp else ''})" if stage.mesh else "one device"
