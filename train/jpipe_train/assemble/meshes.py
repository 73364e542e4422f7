"""Describe the meshes of a plan's stages and their devices."""

import jpipe


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
    """Return the `device_kind` of each device of the run in all processes."""
    return [device.device_kind for device in dict.fromkeys(device for place in pipe.places for device in place.devices)]


def _words(stage: jpipe.Stage) -> str:
    sizes = ", ".join(f"{axis} {size}" for axis, size in stage.mesh.items())
    return f"({sizes}{', fsdp' if stage.fsdp else ''})" if stage.mesh else "one device"
