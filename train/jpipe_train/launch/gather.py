"""Gather numbers of all processes: in all of them one number of each, and in process 0 the traces of all ranks."""

import itertools
from collections.abc import Sequence

import jpipe

_OPS = tuple(jpipe.ops.OPS)
_PIECE = 2**16  # numbers in a message: a megabyte of text; a line of the channel may have sixteen


def share(processes: jpipe.processes.Processes, name: str, number: float, what: str | None = None) -> list[float]:
    """Return the numbers of all processes, by process; all processes call it.

    Args:
        processes: the processes of the run.
        name: the name of these numbers, the same in all processes and unique in a run.
        number: the number of this process.
        what: a description of the numbers for messages; by default their name.

    Raises:
        jpipe.PeerLost: the run is lost.
    """
    processes.broadcast(f"{name} of process {processes.index}", [number])
    return [processes.receive(f"{name} of process {k}", k, what)[0] for k in range(processes.count)]


def gather(processes: jpipe.processes.Processes, pipe: jpipe.Pipeline, name: str, trace: jpipe.runtime.Trace) -> jpipe.runtime.Trace | None:
    """Return the trace of all ranks in process 0, and None in the other processes; all processes call it.

    Args:
        processes: the processes of the run.
        pipe: the pipeline; its devices determine which process measured which rank.
        name: name of this trace, the same in all processes and unique in a run.
        trace: the trace of this process. All traces count time from the same moment.

    Raises:
        jpipe.PeerLost: the run is lost.
    """
    rows, memory = list(trace.timeline), list(trace.memory)
    if processes.index:
        _broadcast(processes, f"{name}, transfers of process {processes.index}", numbers_of_transfers(trace.transfers))
    of_ranks = [pipe.devices[workers[0]].process_index for workers in pipe.plan.rank_workers]
    senders = {rank: sender for rank, sender in enumerate(of_ranks) if sender != 0}
    for rank, sender in senders.items():
        if sender == processes.index:
            _broadcast(processes, f"{name}, rank {rank}", numbers(rows[rank], memory[rank]))
    for rank, sender in senders.items():  # in all processes: a broadcast goes to all, and is kept until it is received
        received = _receive(processes, f"{name}, rank {rank}", sender)
        if processes.index == 0:
            rows[rank], memory[rank] = from_numbers(received)
    transfers = [trace.transfers]
    for sender in range(1, processes.count):
        transfers.append(transfers_from(_receive(processes, f"{name}, transfers of process {sender}", sender)))
    if processes.index:
        return None
    return jpipe.runtime.Trace(tuple(rows), tuple(memory), jpipe.runtime.join_transfers(*transfers))


def _broadcast(processes: jpipe.processes.Processes, message: str, values: Sequence[float]) -> None:
    """Send numbers in pieces, each with the number of pieces after it."""
    starts = range(0, len(values), _PIECE)
    for piece, start in enumerate(starts):
        processes.broadcast(f"{message}, piece {piece}", [len(starts) - piece - 1, *values[start : start + _PIECE]])


def _receive(processes: jpipe.processes.Processes, message: str, sender: int) -> list[float]:
    """Return the numbers that `_broadcast` sent."""
    values: list[float] = []
    for piece in itertools.count():
        remaining, *piece_values = processes.receive(f"{message}, piece {piece}", sender)
        values += piece_values
        if not remaining:
            break
    return values


def numbers(spans: Sequence[jpipe.programs.Span], samples: Sequence[jpipe.programs.MemorySample]) -> list[float]:
    """Return the spans and samples of one rank as numbers, for `from_numbers`."""
    values: list[float] = [len(spans)]
    for span in spans:
        values += [_OPS.index(span.op), *span[1:-1], -1 if span.part is None else span.part]
    for sample in samples:
        versions = [number for version in sample.weights.items() for number in version]
        values += [sample.time, *sample[2:], len(sample.weights), *versions]
    return list(map(float, values))


def from_numbers(values: Sequence[float]) -> tuple[tuple[jpipe.programs.Span, ...], tuple[jpipe.programs.MemorySample, ...]]:
    """Return the spans and samples from `numbers`."""
    remaining = iter(values)

    def whole() -> int:
        return int(next(remaining))

    spans = tuple(
        jpipe.programs.Span(
            _OPS[whole()],
            whole(),
            whole(),
            next(remaining),
            next(remaining),
            bool(next(remaining)),
            next(remaining),
            next(remaining),
            whole(),
            part if (part := whole()) >= 0 else None,
        )
        for _ in range(whole())
    )
    samples = []
    for time in remaining:
        sizes = [whole() for _ in range(4)]
        weights = {whole(): whole() for _ in range(whole())}
        samples.append(jpipe.programs.MemorySample(time, weights, *sizes))
    return spans, tuple(samples)


def numbers_of_transfers(transfers: Sequence[jpipe.programs.Transfer]) -> list[float]:
    """Return transfers as numbers, for `transfers_from`."""
    values: list[float] = [len(transfers)]
    for transfer in transfers:
        kind = transfer.what.encode()
        values += [len(kind), *kind, len(transfer.ranks), *transfer.ranks, *transfer[2:]]
    return list(map(float, values))


def transfers_from(values: Sequence[float]) -> tuple[jpipe.programs.Transfer, ...]:
    """Return the transfers from `numbers_of_transfers`."""
    remaining = iter(values)

    def several() -> list[int]:
        return [int(next(remaining)) for _ in range(int(next(remaining)))]

    return tuple(
        jpipe.programs.Transfer(bytes(several()).decode(), tuple(several()), int(next(remaining)), *(next(remaining) for _ in range(4)))
        for _ in range(int(next(remaining)))
    )
