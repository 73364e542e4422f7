"""Transfers of arrays between workers (messages, sums over replicas, host arrays), and the threads that run transfers between processes."""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jpipe.meshes._place import Place, crowded_meshes
from jpipe.meshes._routes import Route, Shards, joined, same_shards
from jpipe.processes._collectives import Collective
from jpipe.processes._connections import Connection, DevicePutConnection, Reduction
from jpipe.processes._membership import Processes
from jpipe.programs._instructions import AllReduce, Instruction, Receive, Send
from jpipe.stages._arrays import shardings_of
from jpipe.stages._bytes import nbytes

Tree = Any
_Key = tuple[int, int, str, int]  # a kind of message: sender, receiver, name, bucket

_LOOK_SECONDS = 0.5  # seconds between two checks whether the run is lost


class TransferThread:
    """A thread that runs transfers, one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Tree], Tree, Callable[[BaseException], None], Future[Tree]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()  # a daemon thread, because a collective never ends if its peer is gone

    def put(self, transfer: Callable[[], Tree], needs: Tree, fail: Callable[[BaseException], None]) -> "Future[Tree]":
        """Queue a transfer, which runs when the arrays in `needs` are computed; `fail` gets its error, even if nobody waits."""
        future: Future[Tree] = Future()
        self._queue.put((transfer, needs, fail, future))
        return future

    def _work(self) -> None:
        while True:
            transfer, needs, fail, future = self._queue.get()
            try:
                jax.block_until_ready(needs)  # otherwise the collective would block the device's queue, and the computations behind it
                future.set_result(transfer())
            except BaseException as error:
                future.set_exception(error)
                fail(error)
            del transfer, needs, fail, future  # so that the waiting thread keeps no arrays alive


@functools.cache
def transfer_thread(devices: Hashable) -> TransferThread:
    """Return the thread of a link, or of a set of devices. All groups of replicas on these devices share the thread."""
    return TransferThread()


class PendingTransfer:
    """A message in transfer from another process.

    Args:
        future: the future of the arrays.
        words: a description of the message; it is converted to text only when it is printed.
        on: the processes that send the arrays.
        processes: the processes of the run.
        specs: a function that returns the shapes and dtypes of the arrays.
        keys: the path to one part of the arrays; by default all arrays.
    """

    def __init__(
        self,
        future: "Future[Tree]",
        words: object,
        on: tuple[int, ...],
        processes: Processes,
        specs: Callable[[], Tree],
        keys: tuple[int, ...] = (),
    ) -> None:
        self._future: Future[Tree] | None = future
        self._words, self._on, self._processes = words, on, processes
        self._specs, self._keys = specs, keys

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays."""
        return nbytes(self.specs)

    @property
    def specs(self) -> Tree:
        """The shapes and dtypes of the arrays."""
        return self._entry(self._specs())

    def __getitem__(self, key: int) -> "PendingTransfer":
        """Return one part of the arrays."""
        assert self._future is not None
        return PendingTransfer(self._future, self._words, self._on, self._processes, self._specs, (*self._keys, key))

    def is_deleted(self) -> bool:
        """Return whether the message was deleted; arrays have the same method."""
        return self._future is None

    def delete(self) -> None:
        """Drop the arrays."""
        self._future = None

    def when_done(self, call: Callable[[], None]) -> None:
        """Call a function when the arrays have arrived, in the thread that moves them; call it now if they have already arrived."""
        assert self._future is not None
        self._future.add_done_callback(lambda future: call() if future.exception() is None else None)

    def wait(self) -> Tree:
        """Wait for the arrays, and return them. Raise PeerLost if a process of the run died, hung or stopped."""
        assert self._future is not None
        if not self._future.done() or self._future.exception() is not None:
            with self._processes.waiting(self._words, self._on):
                while not self._future.done():
                    self._processes.check()
                    with contextlib.suppress(TimeoutError):
                        self._future.exception(timeout=_LOOK_SECONDS)
                while self._future.exception() is not None:  # usually a process is gone, and `check` raises an error
                    self._processes.check()
                    time.sleep(_LOOK_SECONDS)
        return self._entry(self._future.result())

    def _entry(self, tree: Tree) -> Tree:
        return functools.reduce(lambda part, key: part[key], self._keys, tree)


def arrived(tree: Tree) -> Tree:
    """Return the arrays of a message, after waiting if they are still in transfer from another process."""
    return tree.wait() if isinstance(tree, PendingTransfer) else tree


class Sent(NamedTuple):
    """A kind of message, with the specs of its arrays at the sender and the receiver."""

    send: Send  # one `Send` instruction of this kind
    bucket: int  # the bucket of the batches; 0 if the message is the same for all buckets
    leaving: Tree  # the specs of the arrays, with the shardings at the sender
    arriving: Tree  # the specs of the arrays, with the shardings at the receiver
    copies: bool = False  # whether a receiver on the same device gets a copy


class Transport:
    """Moves arrays between workers: in one process by `jax.device_put`, between processes by collectives over only the devices involved.

    Workers on meshes send each other shards, from device to device (`Route`), and replicas sum shard by shard (`Shards`).

    On CPUs a collective blocks the calling thread until all processes have called it. So each directed link and each group of replicas has
    its own thread, and transfers overlap with computations. On GPUs a collective is an entry of the device's queue. All processes call the
    collectives in the order of the program, and never from two threads. If a probe at the start shows that JAX's `device_put` moves arrays
    between processes, messages use `device_put` instead.

    Args:
        places: the place of each worker; the transport serves the workers of this process.
        stage_workers: the workers of each stage, replica by replica.
        processes: the processes of the run; None if there is only one.
        threads: whether collectives run in threads; by default only on CPUs.

    Attributes:
        calls: the number of messages that all transports of this process have loaded, sent, received or summed. While it grows, the process
            does not hang.
        way: how messages go between processes: by "collectives", or by JAX's "device_put".
        crowded: the workers of this process that must compute one after the other, see `crowded_meshes`.
    """

    calls = 0

    def __init__(
        self,
        places: Sequence[Place],
        stage_workers: Sequence[Sequence[int]],
        processes: Processes | None = None,
        threads: bool | None = None,
    ) -> None:
        process_index = jax.process_index()
        self._places = places
        self._processes = processes
        self._threads = all(place.first.platform == "cpu" for place in places) if threads is None else threads
        self._local = frozenset(w for w, place in enumerate(places) if place.process_index == process_index)
        crowded = crowded_meshes(places[w] for w in self._local)
        self.crowded = frozenset(w for w in self._local if places[w] in crowded)
        self._replicas = {worker: tuple(workers) for workers in stage_workers for worker in workers}
        self._used: dict[Hashable, Connection | Reduction] = {}  # links by thread, in the order in which all processes connect them
        self._routes: dict[_Key, Route] = {}  # routes of messages between processes
        self._arriving: dict[_Key, Tree] = {}  # specs of messages at the receiver
        self._moves: dict[_Key, Callable[[Tree], Tree]] = {}  # functions that move messages inside this process
        self._loads: dict[tuple[int, str], Any] = {}  # shardings of host arrays, by worker and name
        self.way: Literal["collectives", "device_put"] = "collectives"
        self._mailbox: dict[tuple[int, str, int], Tree] = {}  # messages inside this process that are not yet received
        self._parts: dict[tuple[int, int, type, str], dict[int, Tree]] = {}  # by first replica, batch, instruction, piece

    def compile(
        self,
        sends: Iterable[Sent],
        sums: Iterable[tuple[int, Tree]],
        loads: Mapping[tuple[int, str], Tree],
        gathers: Iterable[tuple[int, Tree]] = (),
    ) -> None:
        """Compile the transfers. All processes call this with the same kinds of messages, before the first transfer.

        Args:
            sums: pairs of a stage's first worker and the specs, sharded at this worker, of arrays that the stage's replicas sum.
            loads: the shardings of host arrays that are loaded, by worker of this process and name.
            gathers: pairs as in `sums`, of arrays that each replica sends to all replicas; each replica computes their sum.
        """
        self._loads.update(loads)
        for send, bucket, leaving, arriving, copies in sends:
            source, to, key = self._places[send.worker], self._places[send.to], (send.worker, send.to, send.message, bucket)
            self._arriving[key] = arriving
            if source.process_index == to.process_index:
                self._moves[key] = _move(source, to, leaving, arriving, copies)
            elif not self._local.isdisjoint((send.worker, send.to)):
                self._routes[key] = Route(leaving, arriving)
                for pair in self._routes[key].pieces:
                    link_between(*pair).compile(self._routes[key].specs[pair])
                    self._used[pair] = link_between(*pair)
        for first, spec in sums:
            for reduction, shards in self._reductions(first, spec):
                reduction.compile(shards)
        for first, spec in gathers:
            for reduction, shards in self._reductions(first, [spec] * max(map(len, self._by_process(self._replicas[first])))):
                reduction.compile_gather(shards)

    def _reductions(self, first: int, spec: Tree) -> Iterator[tuple[Reduction, Tree]]:
        """Yield (reduction, specs) for each shard of a tree that the replicas of a stage sum; nothing if this process has no replica."""
        group = self._group(self._replicas[first])
        if len(group) > 1 and not self._local.isdisjoint(self._replicas[first]):
            for number, shards in Shards(spec, self._places[first].devices).specs.items():
                devices = tuple(place.devices[number] for place in group)
                self._used[frozenset(devices)] = reduction_over(devices)
                yield reduction_over(devices), shards

    def connect(self, name: str) -> None:
        """Open the connections to other processes. All processes call this with the same name of the pipeline, after all have compiled.

        The connections are opened one after the other, each in its thread, after transfers of other pipelines in the same thread. Raise
        JaxRuntimeError if the processes cannot be connected.
        """
        other_processes = tuple(sorted({place.process_index for place in self._places} - {jax.process_index()}))
        for thread, collective in self._used.items():
            try:
                arrived(self._call(thread, collective.connect, (), "all processes to connect", other_processes))
            except jax.errors.JaxRuntimeError as error:
                raise jax.errors.JaxRuntimeError(
                    f"the processes cannot be connected: {(str(error).splitlines() or [''])[0]}; gloo and NCCL, which carry arrays, fail "
                    "like this if another program, such as a port scanner, connects to their ports at that moment; start the run again"
                ) from error
        if self._processes is not None and not self._threads:
            self._probe(self._processes, name)

    def _probe(self, processes: Processes, name: str) -> None:
        """Check whether `device_put` moves arrays over all links of all processes. If it does, use it for messages."""
        if all(place.first.platform == "cpu" for place in self._places):
            return  # `device_put` between processes is unreliable on CPUs
        pairs = dict.fromkeys(pair for pair in self._used if isinstance(pair, tuple))
        with processes.waiting("a number sent by jax.device_put"):
            works = [device_put_between(*pair).works() for pair in pairs]  # each link is tried, because the other process tries it
        if all(vote == b"yes" for vote in processes.gather(f"{name}: device_put works", b"yes" if all(works) else b"no")):
            self.way = "device_put"

    def load(self, worker: int, name: str, data: Tree) -> Tree:
        """Copy inputs or labels from the host to a worker of this process. Nobody may write into the host arrays (see `read_rows`)."""
        Transport.calls += 1
        return jax.tree.map(_put, data, self._loads[worker, name])

    def send(self, i: Send, k: int, tree: Tree, bucket: int = 0) -> None:
        """Start moving a message about microbatch `k`, in this bucket, to the worker `i.to`."""
        Transport.calls += 1
        key = i.worker, i.to, i.message, bucket
        if i.to in self._local:
            self._mailbox[i.to, i.message, k] = self._moves[key](tree)
            return
        words, on = _Words(i, k), (self._places[i.to].process_index,)
        for pair, pieces in self._routes[key].cut(tree).items():
            self._call(pair, functools.partial(self._link(pair).send, pieces), pieces, words, on)

    def forget(self) -> None:
        """Drop messages that were sent inside this process and will not be received, because the program that sent them has failed."""
        self._mailbox.clear()
        self._parts.clear()

    def receive(self, i: Receive, k: int, bucket: int = 0) -> Tree:
        """Return a message that was sent to the worker; a message from another process may be a `PendingTransfer`."""
        Transport.calls += 1
        if i.source in self._local:
            return self._mailbox.pop((i.worker, i.message, k))
        key = i.source, i.worker, i.message, bucket
        route, words, on = self._routes[key], _Words(i, k), (self._places[i.source].process_index,)
        calls = {pair: functools.partial(self._link(pair).receive, spec) for pair, spec in route.specs.items()}
        return self._call_all(calls, (), words, on, route.join, lambda: self._arriving[key])

    def all_reduce(
        self,
        i: Instruction,
        batch: int,
        part: Tree,
        add: Callable[[Tree, Tree], Tree],
        finish: jax.stages.Compiled,
        words: object = None,
    ) -> Mapping[int, Tree]:
        """Contribute a replica's part to the sum of `batch`, counted over the whole run, and consume the part.

        Return nothing until this process's last replica has called; then, for each of its replicas, `finish` of the sum over all replicas,
        which may be a `PendingTransfer`. `add` adds two parts, on the device of the first replica of this process; parts are added in the
        order of the replicas, first inside each process. `words` describe the result in messages.
        """
        replicas = self._replicas[i.worker]
        local = [w for w in replicas if w in self._local]
        key = replicas[0], batch, type(i), i.piece
        parts = self._parts.setdefault(key, {})
        parts[i.worker] = part, add, finish
        if len(parts) < len(local):
            return {}
        del self._parts[key]
        _, add, finish = parts[local[0]]
        return self.sum_replicas(replicas, {w: parts.pop(w)[0] for w in local}, add, finish, words or _Words(i, batch))

    def sum_replicas(
        self, replicas: Sequence[int], parts: dict[int, Tree], add: Callable[[Tree, Tree], Tree], finish: jax.stages.Compiled, words: object
    ) -> Mapping[int, Tree]:
        """Sum the parts of a stage's replicas. All processes with some of these replicas call this.

        Return the result of `all_reduce` for each replica of this process. The dict `parts` is emptied.
        """
        local, group = list(parts), self._group(replicas)
        first, total = self._places[local[0]], parts.pop(local[0])
        for w in local[1:]:
            total = add(total, self._moved(parts[w], first))
            del parts[w]
        if len(group) == 1:
            return self._copies(finish(total), local)
        other_processes = tuple(place.process_index for place in group if place.process_index != jax.process_index())
        shards, shardings = Shards(total, first.devices), [leaf.sharding for leaf in jax.tree.leaves(total)]
        cut = shards.cut(total, first.devices)
        del total
        calls = {}
        for number, arrays in cut.items():
            devices = tuple(place.devices[number] for place in group)
            calls[frozenset(devices)] = functools.partial(reduction_over(devices), arrays)
        numbers = dict(zip(calls, cut, strict=True))

        def join(sums: Mapping[Any, list[jax.Array]]) -> Tree:
            whole = shards.join({numbers[thread]: arrays for thread, arrays in sums.items()}, shardings)
            return self._copies(finish(whole), local)

        coming = self._call_all(calls, cut, words, other_processes, join, lambda: dict.fromkeys(local, finish.out_info))
        return {w: coming[w] for w in local}

    def sum_gathered(self, i: Instruction, batch: int, part: Tree, total: jax.stages.Compiled, words: object = None) -> Mapping[int, Tree]:
        """Send a replica's part of the sum of `batch` to all replicas; each replica computes the sum itself.

        Return nothing until this process's last replica has called; then, for each of its replicas, `total` of all parts, in order.
        """
        replicas = self._replicas[i.worker]
        local = [w for w in replicas if w in self._local]
        waiting = self._parts.setdefault((replicas[0], batch, type(i), i.piece), {})
        waiting[i.worker] = part, total
        if len(waiting) < len(local):
            return {}
        del self._parts[replicas[0], batch, type(i), i.piece]
        own = [waiting[w][0] for w in local]
        totals = {w: waiting[w][1] for w in local}

        def sums(parts: list[Tree]) -> dict[int, Tree]:
            return {w: total([self._moved(part, self._places[w]) for part in parts]) for w, total in totals.items()}

        by_process = self._by_process(replicas)
        if len(by_process) == 1:
            return sums(own)
        first, group, most = self._places[local[0]], self._group(replicas), max(map(len, by_process))
        sent = [self._moved(part, first) for part in (*own, *[own[-1]] * (most - len(own)))]
        shards, shardings = Shards(sent, first.devices), [leaf.sharding for leaf in jax.tree.leaves(sent)]
        threads = {number: tuple(place.devices[number] for place in group) for number in shards.specs}
        cut = shards.cut(sent, first.devices)
        calls = {frozenset(devices): functools.partial(reduction_over(devices).gather, cut[number]) for number, devices in threads.items()}

        def join(gathered: Mapping[Any, list[list[jax.Array]]]) -> dict[int, Tree]:
            found: dict[int, Tree] = {}
            for n, workers in enumerate(by_process):
                each = shards.join({number: gathered[frozenset(devices)][n] for number, devices in threads.items()}, shardings)
                found |= dict(zip(workers, each, strict=False))
            return sums([found[w] for w in replicas])

        on = tuple(place.process_index for place in group if place.process_index != jax.process_index())
        coming = self._call_all(calls, cut, words or _Words(i, batch), on, join, lambda: {w: total.out_info for w, total in totals.items()})
        return {w: coming[w] for w in local}

    # Inside ------------------------------------------------------------------------------------------------------------

    def _link(self, pair: tuple[jax.Device, jax.Device]) -> Connection | DevicePutConnection:
        return link_between(*pair) if self.way == "collectives" else device_put_between(*pair)

    def _group(self, replicas: Sequence[int]) -> tuple[Place, ...]:
        """Return for each process with some of these replicas the place of the first one."""
        return tuple(self._places[first] for first, *_ in self._by_process(replicas))

    def _by_process(self, replicas: Sequence[int]) -> list[list[int]]:
        """Return the replicas of each process; the processes are in the order of their first replicas."""
        found: dict[int, list[int]] = {}
        for w in replicas:
            found.setdefault(self._places[w].process_index, []).append(w)
        return list(found.values())

    def _moved(self, tree: Tree, place: Place) -> Tree:
        """Copy arrays to the place of another worker."""
        return jax.device_put(tree, place.like(tree) if place.mesh else place.first)

    def _copies(self, total: Tree, workers: Sequence[int]) -> dict[int, Tree]:
        """Copy the sum to each worker's devices. Each worker gets separate memory, because its update writes into the sum."""
        copies, first = {workers[0]: total}, self._places[workers[0]]
        for w in workers[1:]:
            moved = self._moved(total, self._places[w])
            copies[w] = jax.tree.map(jnp.copy, moved) if self._places[w] == first else moved
        return copies

    def _call_all(
        self,
        calls: Mapping[Any, Callable[[], Tree]],
        needs: Tree,
        words: object,
        on: tuple[int, ...],
        join: Callable[[Mapping[Any, Tree]], Tree],
        specs: Callable[[], Tree],
    ) -> Tree:
        """Start these transfers, and return `join` of their results by thread, perhaps as a `PendingTransfer`."""
        assert self._processes is not None
        if not calls:  # a message without arrays
            return join({})
        if not self._threads:
            return join({thread: self._call(thread, call, needs, words, on) for thread, call in calls.items()})
        self._processes.check()
        if len(calls) == 1:
            ((thread, call),) = calls.items()
            future = transfer_thread(thread).put(lambda: join({thread: call()}), needs, self._processes.fail)
            return PendingTransfer(future, words, on, self._processes, specs)
        futures = [transfer_thread(thread).put(call, needs, self._processes.fail) for thread, call in calls.items()]
        whole = joined(futures, lambda results: join(dict(zip(calls, results, strict=True))), self._processes.fail)
        return PendingTransfer(whole, words, on, self._processes, specs)

    def _call(self, thread: Hashable, transfer: Callable[[], Tree], needs: Tree, words: object, on: tuple[int, ...]) -> Tree:
        """Run a transfer now, or queue it in its thread, which waits for the arrays that the transfer needs."""
        assert self._processes is not None
        if not self._threads:
            with self._processes.waiting(words, on):
                return transfer()
        self._processes.check()
        return PendingTransfer(transfer_thread(thread).put(transfer, needs, self._processes.fail), words, on, self._processes, tuple)


class _Words(NamedTuple):
    """The description of what a process waits for; it is converted to text only when it is printed."""

    instruction: Instruction
    number: int

    def __str__(self) -> str:
        match self.instruction:
            case AllReduce(worker=worker):
                return f"the sum of the gradients of batch {self.number} over the replicas of worker {worker}"
            case Receive(message=message, source=source):
                return f"the {message} of microbatch {self.number} from worker {source}"
            case Send(message=message, to=to):
                return f"worker {to} to take the {message} of microbatch {self.number}"
        return str(self.instruction)


def progress() -> int:
    """Return a number that grows while this process begins or completes transfers."""
    return Collective.done + Transport.calls


def _move(source: Place, to: Place, leaving: Tree, arriving: Tree, copies: bool) -> Callable[[Tree], Tree]:
    """Return the function that moves a message between two places of this process."""
    if source == to:
        return functools.partial(jax.tree.map, jnp.copy) if copies else lambda tree: tree
    if not same_shards(leaving, arriving):  # `device_put` would gather the array on the host
        route = Route(leaving, arriving)
        return lambda tree: route.join({pair: jax.device_put(pieces, pair[1]) for pair, pieces in route.cut(tree).items()})
    if source.mesh or to.mesh:
        return functools.partial(jax.device_put, device=shardings_of(arriving))
    return functools.partial(jax.tree.map, functools.partial(_put, sharding=SingleDeviceSharding(to.first)))


def _put(array: np.ndarray | jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Copy a host array to its devices, or an array to another device. `device_put` would return the same array, but take longer."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__ if isinstance(array, np.ndarray) else lambda _: array)


# All pipelines share one object for the same devices: gloo would mix up the data of two.
link_between = functools.cache(Connection)
reduction_over = functools.cache(Reduction)
device_put_between = functools.cache(DevicePutConnection)
