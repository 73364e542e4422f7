"""Even stages and their ranks, for `Plan.even`."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpipe._numbers import even_numbers, is_int
from jpipe.errors import InputError, short
from jpipe.schedules import SCHEDULES, Ranks, arranged


def even_stages(layers: Sequence[str], num_stages: Any, recompute: Any, replicas: Any, mesh: Any, fsdp: bool) -> list[dict[str, Any]]:
    """Return the fields of stages that hold the same number of layers; for the arguments see `Plan.even`."""
    layers = _layer_ids(layers)
    if not is_int(num_stages):
        raise InputError(where="plan", key="num_stages", expected="an integer", found=short(num_stages))
    num_stages = int(num_stages)
    if not 1 <= num_stages <= len(layers):
        raise InputError(where="plan", expected=f"between 1 and {len(layers)} stages (the number of layers)", found=num_stages)
    policies = _for_each(recompute, str, num_stages, "recompute")
    counts = _for_each(replicas, (int, np.integer), num_stages, "replicas")
    meshes = _for_each({} if mesh is None else mesh, Mapping, num_stages, "mesh")
    for what, values in (("recomputation policy", policies), ("number of replicas", counts), ("mesh", meshes)):
        if len(values) != num_stages:
            raise InputError(
                where="plan", expected=f"one {what} for all stages or one for each of {num_stages} stages", found=f"a list of {len(values)}"
            )
    starts = list(itertools.accumulate(even_numbers(len(layers), num_stages), initial=0))
    return [
        {"layers": tuple(layers[a:b]), "replicas": count, "recompute": policy, "mesh": sizes, "fsdp": fsdp}
        for (a, b), count, policy, sizes in zip(itertools.pairwise(starts), counts, policies, meshes, strict=True)
    ]


def _layer_ids(layers: Any) -> Sequence[str]:
    """Return the layer ids as a list."""
    if not isinstance(layers, (Sequence, Mapping)):
        hint = "its ids, stack.ids" if hasattr(layers, "ids") else "a list of ids"
        raise InputError(where="plan", expected="the layer ids in order", found=type(layers).__name__, change=f"give {hint}")
    return list(layers)


def even_ranks(schedule: str, num_stages: int, num_layers: int, chunks: Any) -> Ranks | None:
    """Return ranks with `chunks` stages each, in the layout of the schedule; None for the default ranks."""
    if not is_int(chunks) or chunks < 1:
        raise InputError(where="plan", key="chunks_per_rank", expected="an integer of 1 or more", found=short(chunks))
    rules = SCHEDULES[schedule]
    if reason := rules.refuses_chunks(int(chunks)):
        raise InputError(f"chunks_per_rank: {reason}", where="plan")
    if num_stages % chunks:
        whole = [count for count in (-(-num_stages // chunks) * chunks, num_stages // chunks * chunks) if 1 <= count <= num_layers]
        fewer = next(count for count in range(int(min(chunks, num_stages)), 0, -1) if num_stages % count == 0)
        # a V always has two chunks
        change = [*(f"{count} stages" for count in whole[:1]), *([] if rules.layout == "v" else [f"chunks_per_rank {fewer}"])]
        raise InputError(
            where="plan",
            expected=f"a number of stages that is a multiple of chunks_per_rank {chunks}",
            found=num_stages,
            change=f"use {' or '.join(change) or 'more layers'}",
        )
    return None if chunks == 1 else arranged(rules.layout, num_stages, int(chunks))


def _for_each(value: Any, kind: Any, num_stages: int, what: str) -> list[Any]:
    """Return one value for each stage, from one value for all stages or from a list."""
    if isinstance(value, kind):
        return [value] * num_stages
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InputError(where="plan", key=what, expected="one value for all stages or a list with one for each stage", found=short(value))
    return list(value)
