"""What an optional capability consists of: frozen values with functions that the core calls; each may be left out.

A capability is a folder in `jpipe/capabilities/` with three modules; each has one of these values:

    option.py   OPTION, an `Option`: what stands in the plan, its checks, and what it cannot be combined with
    program.py  PROGRAM, a `ProgramHooks`: its instructions, where they go into a program, how they are verified and priced; without JAX
    runtime.py  RUNTIME, a `RuntimeHooks`: how its instructions run, what it keeps in the state, and what snapshots have of that

Some functions belong to one object of the core, such as one verifier, and have a state of their own: they are the methods of a subclass of
`LoweringHooks`, `VerifyHooks` or `SnapshotHooks`. The core makes one for each capability that a plan uses, and calls its methods in the
order of the registry.

Many hooks have one user so far. Each stands where the core would need a branch on that capability: with the hook, a reader of the core sees
that something may happen there, and finds what in the folder of the capability. A hook that no capability sets is deleted.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Tree = Any
Hook = Callable[..., Any]


@dataclass(frozen=True)
class Exclusion:
    """Two options that cannot be set together. An option is set if its value is not the default.

    Options are named by their keys: fields of a plan; parts of one, as "offload.versions"; "stages.sum_parts" and "chunks_per_rank"; and
    arguments of a pipeline. Parts of the model, such as "ties", count as options, too. If both are set for some stages only, they exclude
    each other at the same stage.

    Attributes:
        option: the key at which the error stands.
        other: the key of the option that cannot be set with it.
        why: the reason.
        change: what to do; by default to remove one of them.
        without_flush: whether they exclude each other only under schedules that do not flush.
    """

    option: str
    other: str
    why: str
    change: str = "remove one of them"
    without_flush: bool = False


@dataclass(frozen=True)
class Option:
    """The option of a capability in a plan.

    Attributes:
        room: the name of its folder.
        field: the field of the plan, which is None or False where the plan does not use the capability; None if it is in no plan: then it
            is used where its room is among what a program `uses`.
        of_stages: whether it is a field of each stage instead, which is empty where the stage does not use it.
        check: `(plan) -> None`, raises ValueError if the value does not fit the plan; only called where it is set.
        stands_for: for an option that is in no plan, the argument of a pipeline with the exclusions of programs that use it.
        refusal: `(plan, value) -> str`, why no program of a plan can use it with a value, or "".
        check_model: `(plan, StageEntries) -> None`, raises InputError for a model with which the plan cannot use it.
        check_arguments: `(arguments) -> None`, raises InputError for values of arguments of a pipeline, by name as in `excluded`.
        of_arguments: `(arguments, entries) -> value | None` in `StageFunctions.capabilities`, where it comes from arguments of a pipeline;
            `entries` belong to the stages, see `StageEntries`.
        used: `(value) -> value` in `Program.uses`, of that value.
        exclusions: what the option cannot be combined with. Each pair of options is in one list.
        even: `(value, stages) -> stages`, the fields of stages with an argument of `Plan.even`, which has the name of the field.
        with_layers: `(stage, layers) -> fields` that a stage has with other layers.
        text: `(stage) -> str`, what the text of a plan says after the replicas of a stage.
        parallel_pipelines: whether the replicas of a plan that uses it are parallel pipelines, which update by themselves: they sum no
            gradients for their updates.
        divides_updates: whether the replicas of a stage update different entries of its weights.
    """

    room: str
    field: str | None
    of_stages: bool = False
    check: Callable[[Any], None] | None = None
    stands_for: str = ""
    refusal: Callable[[Any, Any], str] | None = None
    check_model: Callable[[Any, Any], None] | None = None
    check_arguments: Callable[[Any], None] | None = None
    of_arguments: Callable[[Any, Any], Any] | None = None
    used: Callable[[Any], Any] | None = None
    exclusions: tuple[Exclusion, ...] = ()
    even: Hook | None = None
    with_layers: Hook | None = None
    text: Hook | None = None
    parallel_pipelines: bool = False
    divides_updates: bool = False

    @property
    def key(self) -> str:
        """The name of its value in `StageFunctions.capabilities`: the plan's field, or the room."""
        return self.field or self.room

    def is_set(self, plan: Any) -> bool:
        """Return whether a plan uses the capability."""
        value = self.in_plan(plan)
        return value is not None and value is not False

    def in_plan(self, plan: Any) -> Any:
        """Return the plan's value: None or False if it does not use the capability; for a field of stages the values of all stages."""
        if self.field is None or not self.of_stages:
            return None if self.field is None else getattr(plan, self.field)
        values = tuple(getattr(stage, self.field) for stage in plan.stages)
        return values if any(values) else None


@dataclass(frozen=True)
class MessageHooks:
    """A message between workers, a sum over the replicas of a stage, or a move to or from the memory of the host.

    Attributes:
        letter: its label in a text grid, before its number.
        colour: the colour in pictures.
        legend: what a picture calls messages of its colour.
        has_number: whether its label has its number.
        is_sum: whether it is a sum.
        price: `(Prices, source, to) -> (freed, size, added)`, in bytes: what it frees at its sender, its size, and what it adds at its
            receiver. Of a sum: `(Prices, stage) -> int`, the bytes that are summed. By default none.
        awaited: `(worker, source, microbatch) -> tuple`, the numbers that tell it from others for the worker that waits for it in a
            prediction; by default the microbatch.
        received: `(worker, receive) -> None`, what it changes at a worker of a prediction.
    """

    letter: str
    colour: str = "#8C8C8C"
    legend: str = "other message"
    has_number: bool = True
    is_sum: bool = False
    price: Hook = lambda prices, source, to: (0, 0, 0)
    awaited: Hook | None = None
    received: Hook | None = None


@dataclass(frozen=True)
class ProgramHooks:
    """What a capability adds to programs, and how that is predicted. In predictions a worker is a `prediction._actions.Worker`.

    Attributes:
        instructions: the types of its instructions, subclasses of `Instruction`.
        messages: what it sends, sums or moves, by `Send.message` or `Transfer.what`.
        carries_over: whether what it does in a batch depends on earlier batches under schedules that flush, too.
        sums: its instructions with which the replicas of a stage begin a sum, all side by side in the total order.
        waits: `(plan, uses) -> stages` with updates that wait for other stages.
        waits_for: by the type of its instructions, `(instruction) -> (type, number)`: the sum that one waits for, by its batch.
        modelled: `(plan) -> plan`, a plan with programs that contain all that the capability does in any step; `due` chooses from them.
        due: `(plan, instruction, shift) -> Instruction | None`, one of its instructions as it is when it runs `shift` batches later.
        stage_cost: `(plan, stage, StageCost, layers) -> StageCost`, the cost of a stage with what changes in it.
        sent_cost: `(plan, stage, StageCost) -> StageCost`, the cost with what changes in what is sent or summed, after all else.
        model_costs: `(plan, costs, shared) -> costs` of all stages, of a model with these `SharedCost`s.
        used: `(costs) -> value` in `Program.uses`, of programs with these costs of stages.
        fit_cost: `(StageCost, spans) -> StageCost`, the cost of a stage with the times of its measured spans.
        pieces: `(stage, StageCost) -> list of bytes` of the pieces in which the replicas of a stage sum gradients; empty: in one.
        per_piece: the fields of `StageCost` that have a number for each of these pieces.
        unit: `(plan) -> int`, into how many ticks the lowering divides the time of a forward.
        lower: the subclass of `LoweringHooks`, made for a `Run`.
        verify: the subclass of `VerifyHooks`, made for the `Verifier` of one worker.
        writers: by the type of instructions, `(worker, instruction) -> None`, writes it as actions and changes of bytes; for one of the
            core in place of its writer there.
        changes: the changes of bytes, by name, `(Prices, StageCost, stage, *arguments) -> Change`.
        begin: `(worker) -> None`, before the first instruction; it may note what is elsewhere then, in `Worker.away`.
        before_compute: `(worker, instruction) -> None`, before a computation.
        before_update: `(worker, instruction) -> None`, before an update.
    """

    instructions: tuple[type, ...] = ()
    messages: Mapping[str, MessageHooks] = field(default_factory=dict)
    carries_over: bool = False
    sums: tuple[type, ...] = ()
    waits: Hook | None = None
    waits_for: Mapping[type, Callable[[Any], tuple[type, int]]] = field(default_factory=dict)
    modelled: Hook | None = None
    due: Hook | None = None
    stage_cost: Hook | None = None
    sent_cost: Hook | None = None
    model_costs: Hook | None = None
    used: Hook | None = None
    fit_cost: Hook | None = None
    pieces: Hook | None = None
    per_piece: tuple[str, ...] = ()
    unit: Hook | None = None
    lower: Hook | None = None
    verify: Hook | None = None
    writers: Mapping[type, Hook] = field(default_factory=dict)
    changes: Mapping[str, Hook] = field(default_factory=dict)
    begin: Hook | None = None
    before_compute: Hook | None = None
    before_update: Hook | None = None


class LoweringHooks:
    """What a capability writes into a program while it is lowered. A worker is a `lowering._progress.Worker`.

    A subclass has some of these:
        before_compute: `(time, worker) -> None`, before the next computation in the order of the worker's rank.
        write: `(worker, op, ticks, microbatch, version) -> int | None`, writes a computation of `ticks` ticks that begins now, and returns
            when it ends; None: the core writes it.
        begins_sums: the stages for which it begins the sums of gradients itself.
        settle: `(worker) -> bool`, before the next computation of a worker's rank: whether it can continue; False if it waits.
        before_update: `(time, worker, batch, retires) -> None`, before an `Update` with these fields is written.
        after_update: the same, after it.
        after_backward: `(worker, k) -> None`, after the backward of a microbatch, where updates wait for a sum or for other stages.
        after_output: `(time, worker, k, to) -> None`, after the output of a microbatch is sent.
        needed: `(worker, batch) -> list of (what, stage or worker, batch)` in `Run.available`: what an update waits for without a flush.
        needed_for_sum: the same: what `complete_sum` waits for.
        complete_sum: `(time, worker, batch) -> None`, completes the gradients that a worker's stage counts (`StageFunctions.counted`),
            before their squares are summed.
        drain: `(time, batch, workers) -> None`, where the pipeline is empty, before these workers update with a batch.
        version_ready: `(worker, version) -> int | None`, the time from which a forward can read a version; None: it is not known yet, and
            the worker's rank is woken later.
        released: `(worker, version) -> None`, after the release of a version is written.
        drained: `(time, worker) -> None`, where the pipeline is empty and all updates are made.
    """


class VerifyHooks:
    """How the instructions of a capability are verified for one worker. All raise `Violation`, by `Verifier.fail`.

    A subclass has some of these:
        checks: by the type of instructions, `(instruction) -> None`; for one of the core in place of its check there.
        sends: the same of sends, by their message.
        receives: the same of receives.
        needs: `(what, number, instruction) -> None`: an instruction of the core reads a weight version, the residuals or the stash of a
            microbatch, or the optimizer state (number 0).
        updated: `(instruction) -> None`, after an update.
        complete: `(batch) -> None`, checks that the gradients are complete that a stage counts, where their squares are summed.
        whole: `(version, where) -> None`, checks that a version is complete where something reads it.
        held: `(batch) -> set[Buffer]`, the buffers that it holds where the pipeline is empty before a batch.
        freed: `(version) -> None`, after a version is freed.
        end: `() -> None`, after the last instruction.
    """


@dataclass(frozen=True)
class TransportHooks:
    """How a message of a capability runs.

    Attributes:
        send: `(Worker, send, update) -> tree`, what is sent.
        specs: `(Arrays, Arrays) -> specs` at the sender and at the receiver.
        receive: `(Worker, receive, update, tree) -> None`, which keeps it; by default under its name in the pending update.
        received: `(WorkerState, receive, update) -> tree`, what was kept, which may still be on its way.
        copies: whether a receiver on the device of the sender gets a copy, because both write into it.
    """

    send: Hook
    specs: Hook
    receive: Hook = lambda worker, i, update, tree: worker.change_update(update, **{i.message: tree})
    received: Hook = lambda state, i, update: state.updates[update][i.message]
    copies: bool = False


@dataclass(frozen=True)
class UpdateHooks:
    """What a capability changes in the updates of a stage.

    Attributes:
        spec: `(Arrays) -> specs` of what an update gets of it.
        argument: `(Worker, update, accumulators) -> tree` with these shapes.
        gradient: `(StageFunctions, argument, gradient) -> gradient` of one entry, before the optimizer.
        step: `(StageFunctions, step) -> step`, functions of (params, optimizer state, accumulators, arguments by capability, position).
    """

    spec: Hook
    argument: Hook
    gradient: Hook
    step: Hook


@dataclass(frozen=True)
class ApartHooks:
    """How a capability updates some entries of a stage by programs of its own.

    Attributes:
        names: `(StageFunctions) -> names` of the entries.
        update: `(CompiledStage, kind, trees, weight, others, number) -> Iterable of (version, optimizer state, zero gradients)` by entry;
            `trees` are the retired version if there is one, the version, optimizer state and gradients, with all entries.
    """

    names: Hook
    update: Hook


@dataclass(frozen=True)
class SumHooks:
    """How the replicas of a stage sum gradients if each sends something to every other one, and sums what it receives.

    Attributes:
        calls: the names of the programs that a sum needs in place of `add` and `finish`.
        run: `(Worker, AllReduce, accumulators, means of the layer state) -> sums`, as `Transport.sum_gathered` returns them.
        specs: `(Arrays) -> list of specs` of what a replica gives, one for each of `Arrays.sums`.
        size: `(accumulators) -> bytes` that a replica gives to each other one for the sum of these.
    """

    calls: tuple[str, ...]
    run: Hook
    specs: Hook
    size: Hook


@dataclass(frozen=True)
class Exchange:
    """How workers exchange activations and gradients. By default messages between stages are sent as they are, and sums go around a ring.

    Attributes:
        encode: `("activation" or "gradient", tree, stage, rng) -> tree` that a stage sends about a microbatch; `rng` is (microbatch, key of
            the run), or None in an evaluation.
        decode: `(message, tree, specs) -> tree` with these shapes and dtypes, from what was sent.
        specs: `(message, specs) -> specs` of what is sent.
        draws: whether `encode` draws random numbers.
        sums: for stages with replicas.
    """

    encode: Hook = lambda message, tree, stage, rng: tree
    decode: Hook = lambda message, tree, specs: tree
    specs: Hook = lambda message, specs: specs
    draws: bool = False
    sums: SumHooks | None = None


@dataclass(frozen=True)
class RuntimeHooks:
    """How a capability runs.

    Instructions and messages:
        handlers: by the type of its instructions, `(Worker, instruction) -> None`.
        messages: how a message runs, by `Send.message`.
        exchange: `(values by field of the plan) -> Exchange` of activations and gradients.
        summed: `(Arrays) -> specs` of what the replicas of a stage sum in place of gradients.

    Programs of a stage:
        calls: `(Arrays) -> dict[str, Call]`, programs of its own, by name, or functions that return them.
        ops: `(StageFunctions) -> dict[str, Op]` for the programs that are pieces of an op, in order. What one leaves as a stash is for the
            next one.
        pieces: `(Arrays) -> dict[str, specs]` of what the replicas of a stage sum, by piece (`Instruction.piece`); empty: all at once.
        costs: `(Arrays) -> dict[str, Any]`, fields of the `StageCost` with the bytes of a stage.
        join_sums: `(Worker, update) -> None`, before the sum of an update is read: puts its pieces together.
        used_calls: by the type of an instruction, `(StageFunctions, instruction) -> names` of the `calls` that it needs.
        shares: `(plan, StageFunctions) -> shares` of the replicas of a stage in its updates.
        update: what it changes in updates.
        apart: what it updates by programs of its own.

    The state of a worker, and snapshots of it:
        specs: `(Arrays) -> Tree` of what it keeps in `WorkerState.capabilities`, under the name of the capability.
        fresh: `(StageFunctions, version, accumulators) -> Tree`, the same before the first batch, from the weights.
        changed_by: the type of instruction after which this is complete for an update; by default the update.
        restored: `(StageFunctions, replica, layers, fresh=) -> Tree`, the same from a snapshot, perhaps for fresh optimizer state.
        restored_updates: `(plan, worker, StageFunctions, layers, updates) -> dict[int, dict]`, the pending updates of a snapshot.
        own_entries: `(plan, stage, replica, layers, entries) -> dict[str, Plain]`, from a snapshot the entries of the worker alone:
            its weights by version in `own`, and its optimizer state.
        at_rest: `(plan, stage, WorkerState) -> WorkerState`: the state before the worker begins.
        snapshot: the subclass of `SnapshotHooks`, made for the `WorkerSnapshot` of one worker.
        copy_for_snapshot: `(plan, stage, what, tree) -> tree`, copies of the optimizer state or of a weight version; None: as usual.
        for_updates: the names of what it keeps in pending updates until these are made.
        copied: `(StageFunctions) -> names` of the entries that several stages hold copies of, in an order that all stages have.

    Reading between programs:
        read: `(CompiledStage, WorkerState) -> params`, the weights that are evaluated and returned in place of the newest ones.
        version_read: `(plan, batch) -> int`, the version of these, in batches, where the pipeline is empty before a batch.
        completes_read: `(plan, functions, batch, workers) -> Program | None`, to run before an evaluation of weights that were read.

    Checks, metrics and traces:
        report: `(MetricsExchange, StageFunctions, updated, RunResults, Metrics) -> list | None`, puts numbers of updates into the metrics;
            returns for each pipeline, by batch, a number that is not 0 if its update changed nothing, or None if that cannot be.
        check_devices: `(plan, devices) -> None`, raises InputError for devices of this process that cannot do it.
        watch: `(TransferWatcher) -> function(event)`, which notes what the capability moves while a run is traced.
        waits_for: `(plan, computations) -> dict`, for a trace: which computations each of them waits for beside its inputs'.
    """

    handlers: Mapping[type, Hook] = field(default_factory=dict)
    messages: Mapping[str, TransportHooks] = field(default_factory=dict)
    exchange: Hook | None = None
    summed: Hook | None = None

    calls: Hook | None = None
    ops: Hook | None = None
    pieces: Hook | None = None
    costs: Hook | None = None
    join_sums: Hook | None = None
    used_calls: Mapping[type, Hook] = field(default_factory=dict)
    shares: Hook | None = None
    update: UpdateHooks | None = None
    apart: ApartHooks | None = None

    specs: Hook | None = None
    fresh: Hook | None = None
    changed_by: type | None = None
    restored: Hook | None = None
    restored_updates: Hook | None = None
    own_entries: Hook | None = None
    at_rest: Hook | None = None
    snapshot: Hook | None = None
    copy_for_snapshot: Hook | None = None
    for_updates: tuple[str, ...] = ()
    copied: Hook | None = None

    read: Hook | None = None
    version_read: Hook | None = None
    completes_read: Hook | None = None

    check_devices: Hook | None = None
    report: Hook | None = None
    watch: Hook | None = None
    waits_for: Hook | None = None


class SnapshotHooks:
    """What a capability has of one worker in a snapshot.

    A subclass has some of these:
        see: `(event) -> None`, after each instruction of the worker, and of the other replicas of its stage in this process.
        completes: `(update) -> type`, the instruction that completes the version that an update makes, if that is another one.
        is_complete: `() -> bool`, whether it has all that it needs.
        saved: `(layer id) -> Plain`, the weights of a layer in place of its versions.
        added: `(layer id) -> dict[str, Plain]`, what it adds to the entry of a layer.
    """


def hooks(name: str, values: Iterable[Any]) -> tuple[Hook, ...]:
    """Return the functions of one name that some values have, in order."""
    return tuple(hook for value in values if (hook := getattr(value, name, None)) is not None)


def made(name: str, values: Iterable[Any], core: Any) -> list[Any]:
    """Return what the functions of one name make for an object of the core."""
    return [hook(core) for hook in hooks(name, values)]


def merged(name: str, values: Iterable[Any]) -> dict[Any, Any]:
    """Return what all values have by type of instruction, or by message."""
    return {kind: hook for value in values for kind, hook in getattr(value, name, {}).items()}
