"""The programs that are compared, how each is started, and its goals."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.programs import free_port, python_module

WORKERS = 2
CEILING = "two JAX jobs (the ceiling)"


@dataclass(frozen=True)
class Entry:
    """A program of the table.

    Attributes:
        name: in the table.
        module: of `benchmarks.peers`.
        kind: its first argument, none for the plain programs.
        processes: how many.
        together: whether they work on the same steps; the jobs of the ceiling do not.
        rival: the torch program that it has to beat.
        share_of_bound: of the ceiling, that it has to reach; for a schedule that flushes of ceiling · m / (m + d - 1).
        flushes: whether its schedule does.
    """

    name: str
    module: str
    kind: str | None = None
    processes: int = WORKERS
    together: bool = True
    rival: str | None = None
    share_of_bound: float | None = None
    flushes: bool = False

    @property
    def is_torch(self) -> bool:
        """Whether it needs PyTorch."""
        return self.module == "torch_program"

    def goal(self, microbatches: int) -> float | None:
        """The share of the ceiling that it has to reach.

        Args:
            microbatches: of a batch.
        """
        if self.share_of_bound is None:
            return None
        return self.share_of_bound * (microbatches / (microbatches + WORKERS - 1) if self.flushes else 1)

    def commands(self, microbatches: int, python: str) -> list[list[str]]:
        """The command line of each process.

        Args:
            microbatches: of a batch.
            python: which Python.
        """
        module = f"benchmarks.peers.{self.module}"
        if self.kind is None and not self.together:
            return [python_module(module, microbatches, python=python) for _ in range(self.processes)]
        port, kind = free_port(), [] if self.kind is None else [self.kind]
        return [
            python_module(module, *kind, microbatches, process, self.processes, port, python=python) for process in range(self.processes)
        ]


SPMD = "plain JAX, SPMD GPipe"
STAGES = Entry("times of the stages", "jpipe_pipeline", "pipedream_flush", processes=1)
CEILING_ENTRY = Entry(CEILING, "jax_plain", together=False)
ENTRIES: Sequence[Entry] = (
    Entry("JAX, one core", "jax_plain", processes=1, together=False),
    Entry("torch, one core", "torch_program", "single", processes=1),
    Entry("torch DDP", "torch_program", "ddp"),
    Entry("torch GPipe", "torch_program", "gpipe"),
    Entry("torch 1F1B", "torch_program", "1f1b"),
    Entry(SPMD, "jax_spmd"),
    Entry("jpipe naive", "jpipe_pipeline", "naive"),
    Entry("jpipe gpipe", "jpipe_pipeline", "gpipe", rival="torch GPipe", share_of_bound=0.95, flushes=True),
    Entry("jpipe pipedream_flush", "jpipe_pipeline", "pipedream_flush", rival="torch 1F1B", share_of_bound=0.95, flushes=True),
    Entry("jpipe pipedream_flush+1", "jpipe_pipeline", "pipedream_flush+1", rival="torch 1F1B", share_of_bound=0.95, flushes=True),
    Entry("jpipe pipedream", "jpipe_pipeline", "pipedream", rival="torch 1F1B", share_of_bound=0.97),
    Entry("jpipe pipedream+1", "jpipe_pipeline", "pipedream+1", rival="torch 1F1B", share_of_bound=0.97),
    Entry("jpipe pipedream_2bw", "jpipe_pipeline", "pipedream_2bw", rival="torch 1F1B", share_of_bound=0.97),
    Entry("jpipe pipedream_2bw+1", "jpipe_pipeline", "pipedream_2bw+1", rival="torch 1F1B", share_of_bound=0.97),
    Entry("jpipe DP", "jpipe_pipeline", "dp", rival="torch DDP", share_of_bound=0.97),
)


def goals(microbatches: int, shares: dict[str, float]) -> list[tuple[str, float, float]]:
    """Goals and measurements: (goal as text, its least value, the measured value) for each goal that was measured.

    Args:
        microbatches: of a batch.
        shares: of the ceiling, by the name of the entry.
    """
    found = []
    for entry in ENTRIES:
        goal = entry.goal(microbatches)
        if goal is None or entry.name not in shares:
            continue
        found.append((f"{entry.name} ÷ ceiling", goal, shares[entry.name]))
        for rival in (entry.rival, SPMD):
            if rival in shares:
                found.append((f"{entry.name} ÷ {rival}", 1.0, shares[entry.name] / shares[rival]))
    pipelines = [shares[name] for name in ("torch GPipe", "torch 1F1B") if name in shares]
    if microbatches == 2 and pipelines:
        for name in ("jpipe pipedream_2bw", "jpipe pipedream_2bw+1"):
            if name in shares:
                found.append((f"{name} ÷ torch's best pipeline", 1.6, shares[name] / max(pipelines)))
    return found
