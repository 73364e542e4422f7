"""The compared programs, how each is started, and its goals."""

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
        share_at_2: the same for two microbatches, if it differs.
        flushes: whether its schedule does.
        times: another entry and how many times as fast as that it has to be with two microbatches.
        least_microbatches: with fewer it is left out.
    """

    name: str
    module: str
    kind: str | None = None
    processes: int = WORKERS
    together: bool = True
    rival: str | None = None
    share_of_bound: float | None = None
    share_at_2: float | None = None
    flushes: bool = False
    times: tuple[str, float] | None = None
    least_microbatches: int = 1

    @property
    def is_torch(self) -> bool:
        """Whether the program needs PyTorch."""
        return self.module == "torch_program"

    def goal(self, microbatches: int) -> float | None:
        """Return the share of the ceiling that the program has to reach, or None if its bound is unknown.

        Args:
            microbatches: of a batch.
        """
        if self.share_of_bound is None:
            return None
        share = self.share_at_2 if microbatches == 2 and self.share_at_2 is not None else self.share_of_bound
        return share * (microbatches / (microbatches + WORKERS - 1) if self.flushes else 1)

    def commands(self, microbatches: int, python: str) -> list[list[str]]:
        """Return the command line of each process.

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
TORCH_ALONE = "torch, one core"
STAGES = Entry("times of the stages", "jpipe_pipeline", "pipedream_flush", processes=1)
CEILING_ENTRY = Entry(CEILING, "jax_plain", together=False)
ENTRIES: Sequence[Entry] = (
    Entry("JAX, one core", "jax_plain", processes=1, together=False),
    Entry(TORCH_ALONE, "torch_program", "single", processes=1),
    Entry("torch DDP", "torch_program", "ddp"),
    Entry("torch GPipe", "torch_program", "gpipe"),
    Entry("torch 1F1B", "torch_program", "1f1b"),
    Entry("torch Interleaved1F1B", "torch_program", "interleaved_1f1b"),
    Entry("torch InterleavedZeroBubble", "torch_program", "interleaved_zero_bubble"),
    Entry("torch LoopedBFS", "torch_program", "looped_bfs"),
    Entry("torch ZBV", "torch_program", "zb_v"),
    Entry("torch DualPipeV", "torch_program", "dualpipe_v", least_microbatches=2 * WORKERS),
    Entry(SPMD, "jax_spmd"),
    Entry("jpipe naive", "jpipe_pipeline", "naive"),
    Entry("jpipe gpipe", "jpipe_pipeline", "gpipe", rival="torch GPipe", share_of_bound=0.97, flushes=True),
    Entry("jpipe pipedream_flush", "jpipe_pipeline", "pipedream_flush", rival="torch 1F1B", share_of_bound=0.97, flushes=True),
    Entry("jpipe pipedream_flush+1", "jpipe_pipeline", "pipedream_flush+1", rival="torch 1F1B", share_of_bound=0.97, flushes=True),
    Entry("jpipe zb_h1", "jpipe_pipeline", "zb_h1", rival="torch 1F1B", times=("jpipe pipedream_flush", 1.15)),
    Entry("jpipe zb_h2", "jpipe_pipeline", "zb_h2", rival="torch 1F1B"),
    Entry(
        "jpipe interleaved_1f1b",
        "jpipe_pipeline",
        "interleaved_1f1b/2",
        rival="torch Interleaved1F1B",
        times=("jpipe pipedream_flush", 1.08),
    ),
    Entry("jpipe interleaved_zero_bubble", "jpipe_pipeline", "interleaved_zero_bubble/2", rival="torch InterleavedZeroBubble"),
    Entry("jpipe looped_bfs", "jpipe_pipeline", "looped_bfs/2", rival="torch LoopedBFS"),
    Entry("jpipe zb_v", "jpipe_pipeline", "zb_v/2", rival="torch ZBV"),
    Entry("jpipe dualpipe_v", "jpipe_pipeline", "dualpipe_v/2", rival="torch DualPipeV", least_microbatches=2 * WORKERS),
    Entry("jpipe pipedream", "jpipe_pipeline", "pipedream", rival="torch 1F1B", share_of_bound=0.97),
    Entry("jpipe pipedream+1", "jpipe_pipeline", "pipedream+1", rival="torch 1F1B", share_of_bound=0.97),
    Entry("jpipe pipedream_2bw", "jpipe_pipeline", "pipedream_2bw", rival="torch 1F1B", share_of_bound=0.97),
    Entry("jpipe pipedream_2bw+1", "jpipe_pipeline", "pipedream_2bw+1", rival="torch 1F1B", share_of_bound=0.97),
    Entry("jpipe DP", "jpipe_pipeline", "dp", rival="torch DDP", share_of_bound=0.97, share_at_2=0.92),
    Entry("jpipe DP, 4 sum parts", "jpipe_pipeline", "dp/4", rival="torch DDP", share_of_bound=0.97, share_at_2=0.92),
    Entry("jpipe DP, shared optimizer", "jpipe_pipeline", "dp+shared", rival="torch DDP"),
)


def goals(microbatches: int, shares: dict[str, float]) -> list[tuple[str, float, float]]:
    """Return (goal as text, its least value, the measured value) for each goal that was measured.

    Args:
        microbatches: of a batch.
        shares: of the ceiling, by the name of the entry.
    """
    results = []
    for entry in ENTRIES:
        if entry.name not in shares:
            continue
        goal, share = entry.goal(microbatches), shares[entry.name]
        if goal is None:
            results += _relative_goals(entry, microbatches, shares)
            continue
        results.append((f"{entry.name} ÷ ceiling", goal, share))
        for rival in (entry.rival, SPMD):
            if rival in shares:
                results.append((f"{entry.name} ÷ {rival}", 1.0, share / shares[rival]))
    pipelines = [shares[name] for name in ("torch GPipe", "torch 1F1B") if name in shares]
    if microbatches == 2 and pipelines:
        for name in ("jpipe pipedream_2bw", "jpipe pipedream_2bw+1"):
            if name in shares:
                results.append((f"{name} ÷ torch's best pipeline", 1.6, shares[name] / max(pipelines)))
    return results


def _relative_goals(entry: Entry, microbatches: int, shares: dict[str, float]) -> list[tuple[str, float, float]]:
    """Return the goals of an entry whose bound is unknown.

    It has to be faster than another schedule, and to reach more of the ceiling than its rival reaches of twice PyTorch's single core.
    """
    results, share = [], shares[entry.name]
    if entry.times is not None and microbatches == 2 and entry.times[0] in shares:
        other, least = entry.times
        results.append((f"{entry.name} ÷ {other}", least, share / shares[other]))
    if entry.rival in shares and TORCH_ALONE in shares:
        results.append((f"{entry.name} ÷ ceiling", shares[entry.rival] / (2 * shares[TORCH_ALONE]), share))
    return results
