"""The meshes of a plan's stages: in words, and what cannot be sharded over them refused before anything is compiled."""

import fnmatch
from collections.abc import Iterator, Mapping

import jax

import jpipe
from jpipe import InputError
from jpipe.plan import mesh_rules
from train.config.config import Config

_HEADS = {"heads": "model.heads", "kv_heads": "model.kv_heads"}  # keys by logical axis


def has_meshes(plan: jpipe.Plan) -> bool:
    """Whether a stage has more than one device for each replica."""
    return any(stage.mesh for stage in plan.stages)


def mesh_words(plan: jpipe.Plan) -> str:
    """`(data 2, model 2)`, `(model 2), one device`, `one device each`."""
    if not has_meshes(plan):
        return "one device each"
    found = [_words(stage) for stage in plan.stages]
    shared = ", optimizer state shared by replicas" if plan.shard_optimizer else ""
    return (found[0] if len(set(found)) == 1 else ", ".join(found)) + shared


def device_kinds(pipe: jpipe.Pipeline) -> list[str]:
    """JAX's name of the kind of each device of the run, those of all processes."""
    each = {device: pipe.plan.stages[s].devices_each for (s, _), device in zip(pipe.plan.workers, pipe.devices, strict=True)}
    return [device.device_kind for device, count in each.items() for _ in range(count)]


def check(config: Config, plan: jpipe.Plan, layers: Mapping[str, jpipe.model.LayerSpec]) -> None:
    """Refuse meshes over which the rows of a microbatch, the heads of a built-in model or a dim of a parameter cannot be shared evenly.

    Args:
        config: of the run.
        plan: of the run.
        layers: shapes and logical axes, by layer id.

    Raises:
        InputError: the first of these.
    """
    rules = mesh_rules(plan)
    for s, stage in enumerate(plan.stages):
        degrees = {name: stage.mesh[axis] for name, axis in rules.items() if axis is not None and axis in stage.mesh}
        if not degrees:
            continue
        of_stage = f"for stage {s} on {_words(stage)}"
        rows = config.train.batch_size // plan.microbatches
        if rows % degrees.get("batch", 1):
            raise InputError(
                f"plan.mesh: expected microbatches whose rows are a multiple of {degrees['batch']} ('{rules['batch']}') {of_stage}, found "
                f"{rows} (train.batch_size {config.train.batch_size} in {plan.microbatches}); change one of them"
            )
        if config.model.target is None and any(layer_id.startswith("block_") for layer_id in stage.layers):
            _check_heads(config, degrees, of_stage)
        for layer_id in stage.layers:
            _check_params(layer_id, layers[layer_id], plan, degrees, of_stage)


def _check_heads(config: Config, degrees: Mapping[str, int], of_stage: str) -> None:
    for name, count in (("heads", config.model.heads), ("kv_heads", config.model.kv_heads_used)):
        if count % (degree := degrees.get(name, 1)):
            raise InputError(
                f"{_HEADS[name]}: expected a multiple of {degree} {of_stage}, found {count}; change it or the mesh, or share no heads: "
                f"plan.rules={{heads: null, kv_heads: null}}"
            )


def _check_params(layer_id: str, spec: jpipe.model.LayerSpec, plan: jpipe.Plan, degrees: Mapping[str, int], of_stage: str) -> None:
    for path, shape in _shapes(spec.params):
        given = (axes for pattern, axes in plan.param_axes.items() if fnmatch.fnmatchcase(f"{layer_id}/{path}", pattern))
        axes = spec.axes.get(path) or next(given, ())
        for dim, (name, size) in enumerate(zip(axes, shape, strict=False)):
            if name is not None and size % (degree := degrees.get(name, 1)):
                raise InputError(
                    f"plan.mesh: layer '{layer_id}': parameter '{path}': dim {dim} ('{name}'): expected a multiple of {degree} {of_stage}, "
                    f"found {size}; change the model or the mesh, or do not shard it: plan.rules={{{name}: null}}"
                )


def _shapes(params: object) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Path and shape of each parameter of a layer."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        yield "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf.shape


def _words(stage: jpipe.plan.Stage) -> str:
    sizes = ", ".join(f"{axis} {size}" for axis, size in stage.mesh.items())
    return f"({sizes}{', fsdp' if stage.fsdp else ''})" if stage.mesh else "one device"
