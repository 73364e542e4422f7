"""What the processes of test_processes.py run: `python joined.py NAME WHERE INDEX COUNT` calls the function of that name below."""

import atexit
import json
import pathlib
import socket
import sys
import threading
import time
import types

NAME, WHERE, INDEX, COUNT = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if not NAME.startswith("jax"):
    # Without the package's own imports: the side channel needs no JAX, and these processes start in a moment.
    sys.modules["jpipe"] = types.ModuleType("jpipe")
    sys.modules["jpipe"].__path__ = [str(pathlib.Path(__file__).parents[3] / "jpipe")]

import jpipe.processes._membership  # noqa: E402 - after the stand-in
from jpipe.errors import InputError, PeerLost  # noqa: E402 - after the stand-in
from jpipe.processes._channel import Limits  # noqa: E402 - after the stand-in
from jpipe.processes._membership import Processes  # noqa: E402 - after the stand-in
from jpipe.processes._rendezvous import Address, Rendezvous  # noqa: E402 - after the stand-in


class Folder:
    """What JAX's store does, in a file, by which the processes find each other."""

    path = pathlib.Path(WHERE, "address")
    process_id, num_processes, coordinator_address = INDEX, COUNT, "127.0.0.1:1"

    @property
    def client(self):
        return self

    def key_value_set(self, key, value):
        self.path.with_suffix(".new").write_text(value)
        self.path.with_suffix(".new").replace(self.path)

    def blocking_key_value_get(self, key, milliseconds):
        while not self.path.exists():
            time.sleep(0.01)
        return self.path.read_text()


def join(limit=30.0, **limits):
    processes = Processes.join(limit=limit, limits=Limits(**limits), rendezvous=Rendezvous.of_jax(Folder()))
    print("ready", flush=True)
    return processes


def well():
    """Join, agree, disagree, meet, send a message and leave."""
    jpipe.processes._membership._MAX_UNREAD = 100
    processes = join()
    config = f"model: gpt\nlearning_rate: {0.2 if INDEX == 2 else 0.1}\nsteps: 3\n"
    processes.agree({"config": "model: gpt", "plan": "{}"})
    try:
        processes.agree({"config": config, "plan": "{}", "device kind": "gpu" if INDEX else "cpu"})
        differences = []
    except InputError as error:
        differences = str(error).splitlines()
    if INDEX == 1:
        processes.broadcast("loss 0", bytes(range(256)))
        processes.broadcast("none", b"")
        processes.broadcast("much", b"x" * 10**7)
    read = processes.receive("loss 0") + processes.receive("none", on=1) + processes.receive("much")
    each = processes.gather("greetings", f"from {INDEX}".encode())
    processes.barrier("middle")
    processes.barrier("middle")
    for number in range(150 if INDEX == 1 else 0):
        processes.broadcast(f"unread {number}", str(number).encode())
    kept_messages = processes.receive("unread 149", on=1) == b"149" and len(processes._arrived)
    processes.check()
    processes.close()
    result = {
        "differences": differences,
        "exact": read == bytes(range(256)) + b"x" * 10**7,
        "each": [text.decode() for text in each],
        "kept": kept_messages in (98, 99),
        "threads": threading.active_count(),
    }
    print(json.dumps(result | {"waits": len(processes._waits)}))


def enter():
    """Join, receive a number and leave; tests disturb these steps."""
    processes = join()
    if INDEX == 1:
        processes.broadcast("loss", b"0.5")
    assert processes.receive("loss") == b"0.5"
    processes.close()
    print("parted")


def stuck(processes, hanging=None):
    """Process 1 waits for 2 and looks about, all others wait for 1 as if in a collective; one may hang in a wait of its own."""
    if hanging == INDEX:
        threading.Event().wait()
    if INDEX == 1:
        with processes.waiting("activations 3", on=2):
            print("waits", flush=True)
            while True:
                processes.check()
                time.sleep(0.01)
    with processes.waiting("gradients 4", on=1):
        print("waits", flush=True)
        time.sleep(100)


def run_and_close(processes, run, *arguments):
    """Call `run`; if a process is lost, print the error, close the connections and exit with status 3."""
    try:
        run(processes, *arguments)
    except PeerLost as lost:
        print(lost)
        processes.close()
        sys.exit(3)


def wait():
    run_and_close(join(silence=4, wait=60, grace=1), stuck)


def hang():
    run_and_close(join(silence=60, wait=2, grace=1), stuck, 2)


def failing():
    """Raise an error while waiting for process 2, as a collective may when one of its processes dies."""
    processes = join(grace=20)

    def run(_):
        with processes.waiting("the sum", on=2):
            print("waits", flush=True)
            sys.stdin.readline()
            raise RuntimeError("connection closed by peer")

    run_and_close(processes, run)


def slow_to_end():
    """Process 1 tells the loss, and then its exit never comes."""
    processes = join(silence=60, wait=60, grace=1)
    try:
        stuck(processes)
    except PeerLost as lost:
        print(lost)
        processes.close()
        time.sleep(100)


def give_up():
    processes = join(grace=20)
    if INDEX == 0:
        sys.stdin.readline()
        processes.stop("the disk\nis full")
        processes.stop("again")
        sys.exit(4)
    run_and_close(processes, (lambda all_: all_.receive("loss 7", on=0)) if INDEX == 1 else (lambda all_: all_.barrier("never")))


def uncaught():
    """Process 1 fails while 0 waits for it and 2 is done."""
    processes = join(grace=20)
    atexit.register(processes.end)
    if INDEX == 1:
        sys.stdin.readline()
        raise ValueError("no data")
    if INDEX == 0:
        processes.receive("loss 7", on=1)


def not_all():
    if INDEX != 2:
        join(limit=1, grace=10)


def unreachable():
    """Tell process 1 a port where nobody listens."""
    if INDEX == 0:
        return
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        Folder().key_value_set("", f"{Address('127.0.0.1', port)} token")
        try:
            join(limit=1.0)
        except InputError as error:
            print(str(error).replace(str(port), "PORT"))


def jax_collective():
    """Run two collectives; process 0 joins the second only after a line on its standard input."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{WHERE}", COUNT, INDEX)
    processes = Processes.join()
    mesh = jax.make_mesh((COUNT,), ("p",))
    ones = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P("p")), jax.numpy.ones(1))
    together = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "p"), mesh=mesh, in_specs=jax.P("p"), out_specs=jax.P()))
    together(ones).block_until_ready()
    print("ready", flush=True)
    if INDEX == 0:
        sys.stdin.readline()
    with processes.waiting("the sum"):
        together(ones).block_until_ready()
    processes.close()
    print("parted")


if __name__ == "__main__":
    globals()[NAME]()
