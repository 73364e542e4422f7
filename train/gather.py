"""What each process measured of its own workers, brought together in process 0: a message of numbers a worker, beside the run."""

from collections.abc import Sequence
from typing import Literal

import jpipe

_OPS: tuple[Literal["F", "B", "FB"], ...] = ("F", "B", "FB")


def gather(processes: jpipe.Processes, pipe: jpipe.Pipeline, name: str, trace: jpipe.Trace) -> jpipe.Trace | None:
    """The trace of all workers in process 0, None in the others; all call it.

    Args:
        processes: of the run.
        pipe: what ran; its devices say which process measured which worker.
        name: of this trace, the same in all processes and only once in a run.
        trace: what this process measured. All count the time from the same moment.

    Raises:
        jpipe.PeerLost: the run is lost.
    """
    rows, memory = list(trace.timeline), list(trace.memory)
    for w, device in enumerate(pipe.devices):
        message, home = f"{name}, worker {w}", device.process_index
        if home == processes.index != 0:
            processes.tell(message, numbers(rows[w], memory[w]))
        elif home != processes.index == 0:
            rows[w], memory[w] = from_numbers(processes.told(message, home))
    return jpipe.Trace(tuple(rows), tuple(memory)) if processes.index == 0 else None


def numbers(spans: Sequence[jpipe.Span], samples: Sequence[jpipe.MemorySample]) -> list[float]:
    """One worker's row as numbers; `from_numbers` reads them."""
    found: list[float] = [len(spans)]
    for span in spans:
        found += [_OPS.index(span.op), *span[1:]]
    for sample in samples:
        versions = [number for version in sample.weights.items() for number in version]
        found += [sample.time, *sample[2:], len(sample.weights), *versions]
    return list(map(float, found))


def from_numbers(found: Sequence[float]) -> tuple[tuple[jpipe.Span, ...], tuple[jpipe.MemorySample, ...]]:
    """The spans and samples that `numbers` wrote."""
    left = iter(found)

    def whole() -> int:
        return int(next(left))

    spans = tuple(
        jpipe.Span(_OPS[whole()], whole(), whole(), next(left), next(left), bool(next(left)), next(left), next(left))
        for _ in range(whole())
    )
    samples = []
    for time in left:
        sizes = [whole() for _ in range(4)]
        weights = {whole(): whole() for _ in range(whole())}
        samples.append(jpipe.MemorySample(time, weights, *sizes))
    return spans, tuple(samples)
