"""The instructions that a lowering has written, with their times."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import chain
from typing import Any

from jpipe.plan import Plan
from jpipe.programs._instructions import Compute, Data, Instruction, Load, Receive, Send


class Listing:
    """The instructions so far, with their times.

    Args:
        plan: the plan that is lowered.
        workers: the workers with instructions in the listing; None: all.
        alike: whether to run only the first replica of each stage, and write its instructions for all replicas: for replica j with
            microbatch k + j in place of k.
    """

    def __init__(self, plan: Plan, workers: Collection[int] | None, alike: bool) -> None:
        self._written_at: defaultdict[int, list[Instruction]] = defaultdict(list)  # by time, doubled; see `take`
        self.workers = None if workers is None else frozenset(workers)
        self._written = written = range(len(plan.workers)) if self.workers is None else self.workers
        replicas, self._each = range(plan.replicas[0] if alike else 1), plan.row_slices
        # The replicas, counted from a worker's replica, for which its instructions are written.
        self._copies = cache(lambda worker: [j for j in replicas if worker + j in written])

    def load(self, time: int, worker: int, k: int, data: Data) -> None:
        """Write the load of a microbatch's inputs or labels."""
        for j in self._copies(worker):
            self._written_at[2 * time + 1].append(Load(worker + j, k + j * self._each, data))

    def compute(self, time: int, op: str, worker: int, k: int, version: int, kind: type[Compute] = Compute, *fields: int) -> None:
        """Write a computation. A capability may have its own type `kind`, with additional fields."""
        for j in self._copies(worker):
            self._written_at[2 * time + 1].append(kind(op, worker + j, k + j * self._each, version, *fields))

    def write(self, time: int, kind: type[Any], worker: int, *fields: int | None) -> None:
        """Write an instruction about a batch or a version; its number is the same in all replicas."""
        for j in self._copies(worker):
            self._written_at[2 * time].append(kind(worker + j, *fields))

    def write_each(self, time: int, worker: int, make: Callable[[int], Instruction]) -> None:
        """Write an instruction for each replica: `make(j)` returns the instruction of replica j, counted from the worker."""
        for j in self._copies(worker):
            self._written_at[2 * time].append(make(j))

    def transfer(self, time: int, source: int, to: int, k: int, message: str) -> None:
        """Write a send, followed by its receive."""
        sent, received = self._copies(source), self._copies(to)
        if not sent and not received:
            return
        of_microbatch = message in ("activation", "gradient")  # other messages are about a batch, k is its last microbatch
        written = self._written_at[2 * time]
        for j in sent if sent == received else sorted({*sent, *received}):
            number = k + j * of_microbatch * self._each
            if j in sent:
                written.append(Send(source + j, number, message, to + j))
            if j in received:
                written.append(Receive(to + j, number, message, source + j))

    def once(self, time: int, instructions: Iterable[Instruction]) -> None:
        """Write instructions that already include all replicas."""
        for i in instructions:
            if i.worker in self._written:
                self._written_at[2 * time].append(i)

    def take(self) -> list[Instruction]:
        """Return the instructions that were written since the last call, in order of time.

        At equal times, transfers, sums and updates come before computations, to overlap with them. Otherwise instructions stay in the order
        in which they were written, which is a topological order.
        """
        taken = [*chain.from_iterable(self._written_at[key] for key in sorted(self._written_at))]
        self._written_at.clear()
        return taken

    def computations(self) -> list[tuple[Compute, int]]:
        """Return the computations with the times at which they start; the computations of each rank are in order."""
        in_order = sorted(self._written_at.items())
        return [(i, key // 2) for key, written in in_order for i in written if isinstance(i, Compute)]
