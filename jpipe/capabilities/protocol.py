"""The hooks of an optional capability: frozen values with functions that the core calls. Every function is optional.

A capability is a folder in `jpipe/capabilities/` with three modules; each has one of these values:

    option.py   OPTION, an `Option`: the field of the plan, its checks, and its exclusions
    program.py  PROGRAM, a `ProgramHooks`: instructions, their places in a program, their verification and price; imports no JAX
    runtime.py  RUNTIME, a `RuntimeHooks`: how its instructions run, what it keeps in the state, and what snapshots save of this

Some functions belong to one object of the core, such as one verifier, and keep state. They are methods of a subclass of `LoweringHooks`,
`VerifyHooks` or `SnapshotHooks`. The core makes one instance for each capability that a plan uses, and calls the methods in the order of
the registry.

Many hooks have one user so far. Each hook is called where the core would otherwise need a branch on this capability. Readers of the core
see there that something may happen, and find the details in the capability's folder. A hook that no capability sets is deleted.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Tree = Any
Hook = Callable[..., Any]


@dataclass(frozen=True)
class Exclusion:
    """Two options that cannot be set together. An option is set if its value is not the default.

    An option has a key: a field of a plan; a part of a field, such as "offload.versions"; "stages.sum_parts" or "chunks_per_rank"; or an
    argument of a pipeline. Parts of the model, such as "ties", count as options, too. If both options are set only for some stages, they
    exclude each other only at the same stage.

    Attributes:
        option: the key of the option that the error names first.
        other: the key of the option that cannot be set with it.
        why: the reason.
        change: what the user can do; by default to remove one of the options.
        without_flush: whether the options exclude each other only under schedules that do not flush.
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
        room: the name of the capability's folder.
        field: the field of the plan; its value is None or False if the plan does not use the capability. None: there is no field, and a
            program uses the capability if `Program.uses` has its room.
        of_stages: whether the field belongs to each stage instead of the plan; it is empty if the stage does not use the capability.
        check: `(plan) -> None`, raises ValueError if the value contradicts the plan; only called if the option is set.
        stands_for: for a capability without a field, the argument of a pipeline with the exclusions that apply to its programs.
        refusal: `(plan, value) -> str`, why no program of a plan can use the capability with this value, or "".
        check_model: `(plan, StageEntries) -> None`, raises InputError if the plan cannot use the capability with the model.
        check_arguments: `(arguments) -> None`, raises InputError if arguments of a pipeline are invalid; by name as in `excluded`.
        of_arguments: `(arguments, entries) -> value | None` for `StageFunctions.capabilities`, if the value comes from arguments of a
            pipeline; `entries` are the `StageEntries` of the stages.
        used: `(value) -> value`, converts this value into the value for `Program.uses`.
        exclusions: the options that exclude this one. Each pair of options is in one list.
        even: `(value, stages) -> stages`, applies the argument of `Plan.even` that has the name of the field to the fields of stages.
        with_layers: `(stage, layers) -> fields`, the fields that change if the stage gets other layers.
        text: `(stage) -> str`, the text after the replicas of a stage in the text of a plan.
        parallel_pipelines: whether the replicas of a plan that uses the capability are parallel pipelines, each with its own updates, for
            which no gradients are summed.
        divides_updates: whether the replicas of a stage update different entries of its weights.
        row_lengths: `(value) -> tuple`, for a capability that cuts the rows of a microbatch into slices: a length or None for each slice.
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
    row_lengths: Hook | None = None

    @property
    def key(self) -> str:
        """The key of the option's value in `StageFunctions.capabilities`: the plan's field, or the room."""
        return self.field or self.room

    def is_set(self, plan: Any) -> bool:
        """Return whether a plan uses the capability."""
        value = self.in_plan(plan)
        return value is not None and value is not False

    def in_plan(self, plan: Any) -> Any:
        """Return the option's value in a plan: None or False if it is not set; for a field of stages the values of all stages."""
        if self.field is None or not self.of_stages:
            return None if self.field is None else getattr(plan, self.field)
        values = tuple(getattr(stage, self.field) for stage in plan.stages)
        return values if any(values) else None


@dataclass(frozen=True)
class MessageHooks:
    """A message between workers, a sum over the replicas of a stage, or a move to or from host memory.

    Attributes:
        letter: the label in a text grid, in front of the number.
        colour: the colour in pictures.
        legend: the name in the legend of a picture.
        has_number: whether the label has a number.
        is_sum: whether this is a sum.
        price: `(Prices, source, to) -> (freed, size, added)`, in bytes: the memory that the message frees at its sender, its size, and the
            memory that it takes at its receiver. For a sum: `(Prices, stage) -> int`, the bytes that are summed. By default 0.
        gathered: `(Prices, stage) -> bytes` that a replica sends to each other replica for a sum that each replica computes itself; 0, the
            default: they sum in a ring.
        awaited: `(worker, source, microbatch) -> tuple`, the numbers by which a worker of a prediction identifies the message that it waits
            for; by default the microbatch.
        received: `(worker, receive) -> None`, changes a worker of a prediction when it receives the message.
    """

    letter: str
    colour: str = "#8C8C8C"
    legend: str = "other message"
    has_number: bool = True
    is_sum: bool = False
    price: Hook = lambda prices, source, to: (0, 0, 0)
    gathered: Hook = lambda prices, s: 0
    awaited: Hook | None = None
    received: Hook | None = None


@dataclass(frozen=True)
class ProgramHooks:
    """What a capability adds to programs, and how to predict it. In predictions a worker is a `prediction._actions.Worker`.

    Attributes:
        instructions: the types of the capability's instructions, subclasses of `Instruction`.
        messages: the capability's messages, sums and moves, by `Send.message` or `Transfer.what`.
        carries_over: whether its instructions of a batch depend on earlier batches even under schedules that flush.
        sums: the types of instructions with which the replicas of a stage begin a sum; they stand side by side in the total order.
        waits: `(plan, uses) -> stages` with updates that wait for other stages.
        waits_for: by type of instruction, `(instruction) -> (type, number)`: the sum that the instruction waits for, by its batch.
        modelled: `(plan) -> plan`, a plan with programs of all that the capability does in any step; `due` selects from these
            programs.
        due: `(plan, instruction, shift) -> Instruction | None`, an instruction of the modelled plan as it runs `shift` batches later.
        stage_cost: `(plan, stage, StageCost, layers) -> StageCost`, the cost of a stage with the capability.
        sent_cost: `(plan, stage, StageCost) -> StageCost`, the cost with the changes of messages and sums; called after all `stage_cost`.
        model_costs: `(plan, costs, shared) -> costs` of all stages, for a model with these `SharedCost`s.
        used: `(costs) -> value` for `Program.uses` of programs with these costs of stages.
        fit_cost: `(StageCost, spans) -> StageCost`, the cost of a stage with the times of its measured spans.
        pieces: `(stage, StageCost) -> list of bytes` of the pieces in which the replicas of a stage sum gradients; empty: one piece.
        per_piece: the fields of `StageCost` that have a number for each of these pieces.
        unit: `(plan) -> int`, the number of ticks into which the lowering divides the time of a forward.
        lower: the subclass of `LoweringHooks`; the core makes an instance for a `Run`.
        verify: the subclass of `VerifyHooks`; the core makes an instance for the `Verifier` of one worker.
        writers: by type of instruction, `(worker, instruction) -> None`, writes the instruction as actions and changes of bytes. For an
            instruction of the core it replaces the core's writer.
        changes: the changes of bytes, by name: `(Prices, StageCost, stage, *arguments) -> Change`.
        begin: `(worker) -> None`, called before the first instruction; it may record in `Worker.away` what is in host memory.
        before_compute: `(worker, instruction) -> None`, called before a computation.
        before_update: `(worker, instruction) -> None`, called before an update.
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
    """What a capability writes into a program while the core lowers it. A worker is a `lowering._progress.Worker`.

    A subclass has some of these:
        before_compute: `(time, worker) -> None`, called before the next computation in the order of the worker's rank.
        write: `(worker, op, ticks, microbatch, version) -> int | None`, writes a computation of `ticks` ticks that begins now, and returns
            the time of its end; None: the core writes the computation.
        begins_sums: the stages for which the capability begins the sums of gradients itself.
        settle: `(worker) -> bool`, called before the next computation of a worker's rank: whether the rank can continue, or must wait.
        before_update: `(time, worker, batch, retires) -> None`, called before an `Update` with these fields is written.
        after_update: `(time, worker, batch, retires) -> None`, called after an `Update` is written.
        after_backward: `(worker, k) -> None`, called after the backward of a microbatch, if updates wait for a sum or for other stages.
        after_output: `(time, worker, k, to) -> None`, called after the output of a microbatch is sent.
        needed: `(worker, batch) -> list of (what, stage or worker, batch)`, the entries of `Run.available` that an update without a flush
            waits for.
        needed_for_sum: `(worker, batch) -> list` as in `needed`, the entries that `complete_sum` waits for.
        complete_sum: `(time, worker, batch) -> None`, completes the gradients that a worker's stage counts (`StageFunctions.counted`),
            before their squares are summed.
        drain: `(time, batch, workers) -> None`, called when the pipeline is empty, before these workers update with a batch.
        version_ready: `(worker, version) -> int | None`, the time from which a forward can read a version; None: the time is not known yet,
            and the worker's rank is woken later.
        released: `(worker, version) -> None`, called after the release of a version is written.
        drained: `(time, worker) -> None`, called when the pipeline is empty and all updates are made.
    """


class VerifyHooks:
    """How the instructions of a capability are verified for one worker. Every method calls `Verifier.fail`, which raises `Violation`.

    A subclass has some of these:
        checks: by type of instruction, `(instruction) -> None`. For an instruction of the core it replaces the core's check.
        sends: by message, `(instruction) -> None` for sends.
        receives: by message, `(instruction) -> None` for receives.
        needs: `(what, number, instruction) -> None`, called when an instruction of the core reads a weight version, the residuals or the
            stash of a microbatch, or the optimizer state (number 0).
        updated: `(instruction) -> None`, called after an update.
        complete: `(batch) -> None`, checks that the gradients that a stage counts are complete before their squares are summed.
        whole: `(version, where) -> None`, checks that a version is complete when an instruction reads it.
        held: `(batch) -> set[Buffer]`, the buffers that the capability holds when the pipeline is empty before a batch.
        freed: `(version) -> None`, called after a version is freed.
        end: `() -> None`, called after the last instruction.
    """


@dataclass(frozen=True)
class TransportHooks:
    """How a message of a capability runs.

    Attributes:
        send: `(Worker, send, update) -> tree`, the arrays to send.
        specs: `(Arrays, Arrays) -> (specs, specs)`, at the sender and at the receiver.
        receive: `(Worker, receive, update, tree) -> None`, stores the received arrays; by default in the pending update, under the name of
            the message.
        received: `(WorkerState, receive, update) -> tree`, the stored arrays, which may still be in transfer.
        copies: whether a receiver on the device of the sender gets a copy, because sender and receiver write into the arrays.
    """

    send: Hook
    specs: Hook
    receive: Hook = lambda worker, i, update, tree: worker.change_update(update, **{i.message: tree})
    received: Hook = lambda state, i, update: state.updates[update][i.message]
    copies: bool = False


@dataclass(frozen=True)
class UpdateHooks:
    """What a capability changes in the updates of a stage."""

    spec: Hook  # `(Arrays) -> specs` of the argument that an update gets from the capability
    argument: Hook  # `(Worker, update, accumulators) -> tree`, the argument
    gradient: Hook  # `(StageFunctions, argument, gradient) -> gradient`, changes the gradient of one entry before the optimizer
    # `(StageFunctions, step) -> step`, wraps the optimizer step, a function of (params, optimizer state, accumulators, arguments by
    # capability, position)
    step: Hook


@dataclass(frozen=True)
class ApartHooks:
    """How a capability updates some entries of a stage with separate programs.

    Attributes:
        names: `(StageFunctions) -> names` of the entries.
        update: `(CompiledStage, kind, trees, weight, others, number) -> Iterable of (version, optimizer state, zero gradients)` by entry;
            `trees` are the retired version if there is one, the version, the optimizer state and the gradients, with all entries.
    """

    names: Hook
    update: Hook


@dataclass(frozen=True)
class SumHooks:
    """How the replicas of a stage sum gradients if each replica sends its part to all others and computes the sum itself."""

    calls: tuple[str, ...]  # the names of the programs that a sum needs instead of `add` and `finish`
    run: Hook  # `(Worker, AllReduce, accumulators, means of the layer state) -> sums`, the result of `Transport.sum_gathered`
    specs: Hook  # `(Arrays) -> list of specs`, for each of `Arrays.sums` the specs of a replica's part
    size: Hook  # `(accumulators) -> bytes` that a replica sends to each other replica for the sum of these accumulators


@dataclass(frozen=True)
class Exchange:
    """How workers exchange activations and gradients. By default messages between stages are sent unchanged, and sums use a ring.

    Attributes:
        encode: `("activation" or "gradient", tree, stage, rng) -> tree`, the arrays that a stage sends for a microbatch; `rng` is
            (microbatch, key of the run), or None in an evaluation.
        decode: `(message, tree, specs) -> tree` with these shapes and dtypes, from the received arrays.
        specs: `(message, specs) -> specs` of the arrays that are sent.
        draws: whether `encode` draws random numbers.
        sums: how the replicas of a stage sum gradients; None: by a ring.
    """

    encode: Hook = lambda message, tree, stage, rng: tree
    decode: Hook = lambda message, tree, specs: tree
    specs: Hook = lambda message, specs: specs
    draws: bool = False
    sums: SumHooks | None = None


@dataclass(frozen=True)
class RuntimeHooks:
    """How a capability runs.

    The model:
        added_layers: `(LayerStack, plan) -> (LayerStack, plan)`, both with the layers that the capability adds to the model.

    Instructions and messages:
        handlers: by type of instruction, `(Worker, instruction) -> None`, runs the instruction.
        messages: the hooks of each message, by `Send.message`.
        exchange: `(values by field of the plan) -> Exchange` of activations and gradients.
        summed: `(Arrays) -> specs` of the arrays that the replicas of a stage sum instead of gradients.
        gathered: `(Arrays) -> specs | None` of a replica's part of this sum, if each replica sends its part to all and computes the sum.

    Programs of a stage:
        calls: `(Arrays) -> dict[str, Call]`, additional programs by name; a value may also be a function that returns the `Call`.
        ops: `(StageFunctions) -> dict[str, Op]` for the programs that compute one piece of an op, in order. Each leaves a stash for the
            next piece.
        pieces: `(Arrays) -> dict[str, specs]` of the arrays that the replicas of a stage sum, by piece (`Instruction.piece`); empty: one
            sum.
        costs: `(Arrays) -> dict[str, Any]`, fields of `StageCost` with the bytes of a stage.
        join_sums: `(Worker, update) -> None`, joins the pieces of an update's sum before the sum is read.
        used_calls: by type of instruction, `(StageFunctions, instruction) -> names` of the `calls` that the instruction needs.
        variants: `(plan, spec, functions) -> list of the functions of all stages`, for each slice of the rows of a microbatch with these
            shapes; whole microbatches are only evaluated.
        shares: `(plan, StageFunctions) -> shares`, the `Share` of each replica in the updates of a stage.
        update: the changes of updates.
        apart: the entries that the capability updates with its own programs.

    The state of a worker, and snapshots of it:
        specs: `(Arrays) -> Tree`, the specs of the arrays that the capability keeps in `WorkerState.capabilities`, under its name.
        fresh: `(StageFunctions, version, accumulators) -> Tree`, these arrays before the first batch, from the weights.
        changed_by: the type of instruction after which these arrays are complete for an update; by default the update.
        restored: `(StageFunctions, replica, layers, fresh=) -> Tree`, these arrays from a snapshot; `fresh` says whether the optimizer
            state is new.
        restored_updates: `(plan, worker, StageFunctions, layers, updates) -> dict[int, dict]`, the pending updates from a snapshot.
        own_entries: `(plan, stage, replica, layers, entries) -> dict[str, Plain]`, the entries of a snapshot that belong only to this
            worker: its weights by version in `own`, and its optimizer state.
        at_rest: `(plan, stage, WorkerState) -> WorkerState`, the state before the worker begins.
        snapshot: the subclass of `SnapshotHooks`; the core makes an instance for the `WorkerSnapshot` of one worker.
        copy_for_snapshot: `(plan, stage, what, tree) -> tree`, copies of the optimizer state or of a weight version; None: the core copies.
        for_updates: the names of the fields that the capability keeps in a pending update until it is made.
        copied: `(StageFunctions) -> names` of the entries that several stages hold, in the same order at all stages.

    Reading between programs:
        read: `(CompiledStage, WorkerState) -> params`, the weights that are evaluated and returned instead of the newest weights.
        version_read: `(plan, batch) -> int`, the version of these weights, in batches, when the pipeline is empty before a batch.
        completes_read: `(plan, functions, batch, workers) -> Program | None`, a program that runs before an evaluation and completes the
            weights that were read.

    Checks, metrics and traces:
        report: `(MetricsExchange, StageFunctions, updated, RunResults, Metrics) -> list | None`, adds numbers of updates to the metrics. It
            returns for each pipeline a dict by batch, with a number other than 0 if the update was skipped; None if no update can be.
        check_devices: `(plan, devices) -> None`, raises InputError if devices of this process cannot run the capability.
        watch: `(TransferWatcher) -> function(event)`, which records the transfers of the capability while a run is traced.
        waits_for: `(plan, computations) -> dict`, for a trace: the computations that each computation waits for in addition to its inputs.
    """

    added_layers: Hook | None = None

    handlers: Mapping[type, Hook] = field(default_factory=dict)
    messages: Mapping[str, TransportHooks] = field(default_factory=dict)
    exchange: Hook | None = None
    summed: Hook | None = None
    gathered: Hook | None = None

    calls: Hook | None = None
    ops: Hook | None = None
    pieces: Hook | None = None
    costs: Hook | None = None
    join_sums: Hook | None = None
    used_calls: Mapping[type, Hook] = field(default_factory=dict)
    variants: Hook | None = None
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
    """What a capability saves of one worker in a snapshot.

    A subclass has some of these:
        see: `(WorkerState) -> None`, called with the state after each instruction of the worker, and of the other replicas of its stage in
            this process.
        completes: `(update) -> type`, the type of instruction that completes an update's version, if it is not the update itself.
        is_complete: `() -> bool`, whether the snapshot has everything that the capability saves.
        saved: `(layer id) -> Plain`, the weights of a layer, saved instead of its versions.
        added: `(layer id) -> dict[str, Plain]`, additions to the entry of a layer.
    """


def hooks(name: str, values: Iterable[Any]) -> tuple[Hook, ...]:
    """Return the functions that the values have under a name, in order; values without it are skipped."""
    return tuple(hook for value in values if (hook := getattr(value, name, None)) is not None)


def made(name: str, values: Iterable[Any], core: Any) -> list[Any]:
    """Call the functions that the values have under a name with an object of the core, and return the results."""
    return [hook(core) for hook in hooks(name, values)]


def merged(name: str, values: Iterable[Any]) -> dict[Any, Any]:
    """Merge the dicts that the values have under a name, by type of instruction or by message."""
    return {kind: hook for value in values for kind, hook in getattr(value, name, {}).items()}
