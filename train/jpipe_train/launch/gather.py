"""Collect the traces of all ranks in process 0."""

import dataclasses
import json

import pydantic

import jpipe


def gather(processes: jpipe.processes.Processes, pipe: jpipe.Pipeline, name: str, trace: jpipe.runtime.Trace) -> jpipe.runtime.Trace | None:
    """Return the trace of all ranks in process 0 and None in the other processes; all call this with their traces.

    In all traces, time 0 must be the same moment. The devices of the pipeline determine which process measured which rank. The name must be
    unique in a run. Raise jpipe.PeerLost if the run is lost.
    """
    received = processes.gather(name, encoded(trace) if processes.index else b"")
    if processes.index:
        return None
    traces = [trace, *map(decoded, received[1:])]
    measured_by = [traces[pipe.devices[workers[0]].process_index] for workers in pipe.plan.rank_workers]
    return jpipe.runtime.Trace(
        tuple(one.timeline[rank] for rank, one in enumerate(measured_by)),
        tuple(one.memory[rank] for rank, one in enumerate(measured_by)),
        jpipe.runtime.join_transfers(*(one.transfers for one in traces)),
    )


def encoded(trace: jpipe.runtime.Trace) -> bytes:
    """Convert a trace to JSON for `decoded`, without rounding."""
    return json.dumps(dataclasses.asdict(trace)).encode()


def decoded(text: bytes) -> jpipe.runtime.Trace:
    """Convert JSON from `encoded` back to a trace."""
    return pydantic.TypeAdapter(jpipe.runtime.Trace).validate_json(text)
