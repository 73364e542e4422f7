"""The fingerprint of a pipeline: everything that determines the content of its states, by name."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jpipe.meshes._place import Place
from jpipe.model._layer import describe
from jpipe.plan import Plan
from jpipe.stages._batch import Batch
from jpipe.stages.functions._stage import StageFunctions

Tree = Any
Fingerprint = tuple[tuple[str, str], ...]


def fingerprint(
    plan: Plan, uses: Iterable[str], places: Sequence[Place], specs: Sequence[Batch], functions: Sequence[StageFunctions]
) -> Fingerprint:
    """Everything that determines the content of a state, by name.

    Args:
        plan: the plan of the pipeline.
        uses: the names of what programs do beside the plan.
        places: where each worker computes.
        specs: shapes and dtypes of a microbatch, of each bucket.
        functions: the functions of each stage.
    """
    fields = plan.model_dump(exclude={"format", "stages", "predicted"}).items()
    stages = ((f"stage {s}", f"{stage.replicas} × {', '.join(stage.layers)}") for s, stage in enumerate(plan.stages))
    recompute = ("recompute", ", ".join(stage.recompute for stage in plan.stages))
    weights = [(f.specs.params, f.specs.state) for f in functions]
    optimizer = [(f.optimizer_spec, f.accumulators_spec) for f in functions]
    return (
        *((name, str(value)) for name, value in fields),
        *stages,
        recompute,
        *((name.replace("_", " "), "used") for name in uses),
        ("devices", ", ".join(str(device) for place in places for device in place.devices)),
        ("meshes", ", ".join(f"{dict(stage.mesh)}{' fsdp' * stage.fsdp}" for stage in plan.stages)),
        ("microbatch", " or ".join(map(describe, specs))),
        ("microbatch in full", _shapes(specs)),
        ("precision", str(functions[0].precision)),
        ("weights and layer state", _shapes(weights)),
        ("optimizer state", _shapes(optimizer)),
    )


def model_of(functions: Sequence[StageFunctions]) -> str:
    """Return the layers and a hash of their parameter, state and optimizer state shapes, which no cut into stages changes."""
    layers: dict[str, Tree] = {}
    for f in functions:
        for kind, entries in (("parameters", f.specs.params), ("state", f.specs.state), ("optimizer", f.optimizer_spec)):
            layers |= {f"{kind} of {entry}": spec for entry, spec in entries.items()}
    return _shapes(dict(sorted(layers.items())))


def _shapes(tree: Tree) -> str:
    """Return a hash of a tree's structure, shapes and dtypes."""
    leaves = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in jax.tree.leaves_with_path(tree)]
    return f"of shapes with the hash {hashlib.sha256(repr(leaves).encode()).hexdigest()[:8]}"
