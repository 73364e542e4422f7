"""The interpreter, which runs a program instruction by instruction. It knows no schedule and reads no configuration."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax

from jpipe.context import Positions
from jpipe.programs._instructions import (
    AllReduce,
    Compute,
    Instruction,
    Load,
    Program,
    Receive,
    Release,
    Send,
    Update,
    shifted,
)
from jpipe.runtime._nan_check import checked
from jpipe.runtime._transport import Transport
from jpipe.runtime._worker import Added, ConsumedArrays, Data, RunResults, Worker
from jpipe.runtime.state import WorkerState
from jpipe.stages._batch import Cut, read_rows
from jpipe.stages._compiled_stage import CompiledStage

Tree = Any


class Event(NamedTuple):
    """An instruction that was just dispatched.

    Attributes:
        instruction: the instruction; its batch, microbatch and version are counted over the whole run.
        done: for a computation, an array that is ready when the computation has ended: `done.block_until_ready()` waits. Otherwise None.
        state: the state of the instruction's worker, with arrays that may not be ready. Only read it, and only during the call.
    """

    instruction: Instruction
    done: jax.Array | None
    state: WorkerState


Observer = Callable[[Event], None]


def run(
    program: Program,
    shift: int,
    stages: Mapping[int, Sequence[CompiledStage]],
    buckets: Callable[[int], int],
    states: Mapping[int, WorkerState],
    transport: Transport,
    data: Data,
    observe: Observer | None = None,
    *,
    consume: bool = True,
    added: Added | None = None,
) -> tuple[dict[int, WorkerState], RunResults]:
    """Dispatch all instructions of `program`, `shift` batches later than it was lowered for.

    Return the new states, and the losses, evaluations and other numbers.

    Args:
        buckets: a function that returns the number of the stage in `stages` for a microbatch, counted over the whole run.
        data: the data from `read_data`, which is consumed.
        observe: a function that is called after each instruction is dispatched.
        added: the additions of the plan's capabilities; None looks them up.
        consume: whether to delete the arrays of the states that the new states do not share. If False, the program must not train.
    """
    plan, results, consumed, config = program.plan, RunResults({}, {}, defaultdict(dict)), ConsumedArrays(), cast(Any, jax.config)
    if config.jax_debug_nans or config.jax_debug_infs:
        stages = checked(plan, stages)
    added = added or Added.by(program.plan, {name for of_worker in stages.values() for name in of_worker[0].functions.capabilities})
    workers: dict[int, Worker] = {}
    for w, state in states.items():
        workers[w] = Worker(program, w, shift, stages[w], buckets, state, transport, data, workers, results, consumed, added)
    handlers = _METHODS | added.handlers
    for each in workers.values() if consume else ():
        each.count_arrays()
    try:
        for instruction in program.instructions:
            worker = workers[instruction.worker]
            handlers[type(instruction)](worker, instruction)
            if worker.changed_parts:
                worker.delete_unused()
            if worker.runs_serially:
                worker.settle()
            if observe is not None:
                observe(Event(shifted(instruction, plan, shift), worker.done, worker.state.freeze()))
                worker.done = None
        return {w: worker.state.freeze() for w, worker in workers.items()}, results
    except BaseException:
        transport.forget()
        consumed.delete()
        for each in workers.values() if consume else ():
            each.delete_state()
        raise
    finally:
        workers.clear()  # workers refer to each other, and would keep arrays until the garbage collector runs


def read_data(program: Program, batches: Mapping[str, Tree], rows_each: int, slices: Sequence[Positions] = ()) -> Data:
    """Read all rows that the program loads. Reading may fail, so it precedes the run, which consumes the states.

    `batches` has the program's batches, concatenated, as host arrays `{"inputs": …, "labels": …}`. `slices` has the positions of each
    slice, if the program counts slices. Raise InputError if rows do not have the shape or dtype that their array states.
    """
    data, plan = Data(), program.plan
    cut = {name: [jax.tree.map(partial(Cut, positions=positions), batch) for positions in slices] for name, batch in batches.items()}
    for i in program.instructions:
        if type(i) is Load:
            row = (i.microbatch // plan.row_slices - program.begin * plan.microbatches // plan.row_slices) * rows_each
            batch = cut[i.data][i.microbatch % len(slices)] if slices else batches[i.data]
            data[i.data, i.microbatch] = read_rows(batch, row, row + rows_each)
    return data


_METHODS: dict[type, Callable[[Worker, Any], None]] = {
    Load: Worker.load,
    Compute: Worker.compute,
    Send: Worker.send,
    Receive: Worker.receive,
    AllReduce: Worker.all_reduce,
    Update: Worker.update,
    Release: Worker.release,
}
