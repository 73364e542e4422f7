"""Orders as text, such as "F0.0 F0.1 B0.0 B0.1" for each rank: write, read and check them."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from jpipe.ops import OPS
from jpipe.schedules._schedule import Action, Ranks, Shape

_ENTRY = re.compile(r"([A-Z]+)(\d{1,4})\.(\d{1,9})", re.ASCII)
_PARTS = "FIW"  # each is a separate op


def as_text(order: Iterable[Action]) -> str:
    """Return the order of one rank as the text that `read_order` reads."""
    return " ".join(f"{op}{s}.{k}" for op, s, k in order)


class _WrongOrder(Exception):
    """An order that cannot be run; the message says where and why."""


def read_order(plan: Shape) -> tuple[tuple[Action, ...], ...] | str:
    """Return the computations of each rank, with one replica's microbatches counted from 0, or why the plan's order is wrong."""
    assert plan.options.order is not None
    microbatches_of_ranks = tuple(plan.microbatches // plan.replicas[stages[0]] for stages in plan.pipeline_ranks)
    return _read(plan.options.order, plan.pipeline_ranks, microbatches_of_ranks, plan.options.order_limit)


@lru_cache(maxsize=16)  # plans read their order at each step
def _read(order: tuple[str, ...], ranks: Ranks, microbatches: tuple[int, ...], limit: int | None) -> tuple[tuple[Action, ...], ...] | str:
    if len(order) != len(ranks):
        change = "add the other ranks" if len(order) < len(ranks) else f"remove all after the first {len(ranks)}"
        return f"order: expected one text for each of {len(ranks)} ranks, found {len(order)}; {change}"
    last = max(s for stages in ranks for s in stages)
    texts = enumerate(zip(order, ranks, strict=True))
    try:
        return tuple(_Checks(p, stages, microbatches[p], last, limit).read(text) for p, (text, stages) in texts)
    except _WrongOrder as error:
        return str(error)


class _Checks:
    """A reader that checks the text of one rank.

    Args:
        p: the pipeline rank.
        stages: the stages that the rank runs.
        microbatches: the number of microbatches of one replica.
        last: the last stage of the pipeline.
        limit: the largest number of microbatches that the rank may hold, or None.
    """

    def __init__(self, p: int, stages: tuple[int, ...], microbatches: int, last: int, limit: int | None) -> None:
        self.p, self.stages, self.microbatches, self.last, self.limit = p, stages, microbatches, last, limit
        self.done = Counter[tuple[str, int]]()  # by part and stage
        self.in_flight = 0
        self.last_forward = ""  # the op with the last stage's forwards

    def read(self, text: str) -> tuple[Action, ...]:
        """Return the computations in a text."""
        order = list[Action]()
        for n, token in enumerate(text.split()):
            order.append(self._entry(f"order.{self.p}: entry {n}", token))
        for s in self.stages:
            for part in _PARTS:
                if (done := self.done[part, s]) < self.microbatches:
                    missing = f"stage {s} lacks the {OPS[part].label} of microbatch {done}" + (
                        f" and {remaining} more" if (remaining := self.microbatches - done - 1) else ""
                    )
                    change = f"add {'B' if part == 'I' else part}{s}.{done}" + (" and so on" if remaining else "")
                    expected = f"expected microbatches 0 to {self.microbatches - 1}; {change}"
                    raise _WrongOrder(f"order.{self.p}: after {len(order)} entries {missing}; {expected}")
        return tuple(order)

    def _entry(self, where: str, token: str) -> Action:
        names = [op.name for op in OPS.values() if op.trains]
        if (match := _ENTRY.fullmatch(token)) is None or match[1] not in names:
            what = f"expected an op ({', '.join(names)}), a stage and a microbatch, such as F0.3"
            raise _WrongOrder(f"{where}: {what}, found {token[:40]!r}")
        op, s, k = match[1], int(match[2]), int(match[3])
        where = f"{where}, {token}"
        if s not in self.stages:
            raise _WrongOrder(f"{where}: expected one of the stages {list(self.stages)} of rank {self.p}, found stage {s}")
        if OPS[op].begins:
            self._check_forward(where, op, s)
        self._check_place(where, op, s, k)
        self.done.update((part, s) for part in OPS[op].parts)
        self.in_flight += OPS[op].begins
        if self.limit is not None and self.in_flight > self.limit:
            over = self.in_flight - self.limit
            holds = f"with it rank {self.p} holds {self.in_flight} microbatches, {over} more than order_limit {self.limit}"
            raise _WrongOrder(f"{where}: {holds}; move backwards for weights before this entry, or raise order_limit")
        self.in_flight -= OPS[op].finishes
        return Action(op, s, k)

    def _check_forward(self, where: str, op: str, s: int) -> None:
        """Check that only the last stage fuses forward and backward, and that it uses the same op for all microbatches."""
        if s < self.last and OPS[op].parts != "F":
            raise _WrongOrder(f"{where}: only the last stage, {self.last}, can run {op}, because it waits for no other stage; use F")
        if s == self.last and (self.last_forward or op) != op:
            raise _WrongOrder(f"{where}: expected {self.last_forward}, as for the microbatches before it at stage {s}, found {op}")
        self.last_forward = op if s == self.last else self.last_forward

    def _check_place(self, where: str, op: str, s: int, k: int) -> None:
        """Check that microbatches are in order, and that each computation comes after what it needs."""
        parts = OPS[op].parts
        for part in parts:
            expected = self.done[part, s]
            if expected == self.microbatches:
                raise _WrongOrder(
                    f"{where}: stage {s} has already had the {OPS[part].label} of all {expected} microbatches; remove this entry"
                )
            if k != expected:
                raise _WrongOrder(
                    f"{where}: expected microbatch {expected} as the next {OPS[part].label} of stage {s}, found microbatch {k}"
                )
        for part, needs in (("I", "F"), ("W", "I")):
            if part in parts and needs not in parts and self.done[needs, s] <= k:
                raise _WrongOrder(
                    f"{where}: expected the {OPS[needs].label} of microbatch {k} at stage {s} before this entry; put {needs}{s}.{k} there"
                )
