"""Flat jaxprs: calls inlined."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Leaf(NamedTuple):
    number: int
    index: tuple = ()


@dataclass(frozen=True)
class Flat:
    closed: Any
    leaves: tuple
    results: tuple


def flatten(closed, num_leaves):
    return Flat(closed, tuple(Leaf(i, ()) for i in range(num_leaves)), tuple(Leaf(i, ()) for i in range(len(closed.jaxpr.outvars))))
