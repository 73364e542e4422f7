"""Real processes agree, exchange numbers, and exit with a message when one of them is killed, stopped, hangs or fails."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
import pytest

from jpipe import InputError
from jpipe.processes import Address, Rendezvous, _membership, handshake, jax_internals
from jpipe.processes._channel import Channel
from jpipe.processes._coordinator import Beat, Coordinator
from jpipe.processes._membership import Processes
from jpipe.runtime import _metrics, _transport

PROGRAM = Path(__file__).parent / "joined.py"
ENDED = "process {} disconnected unexpectedly: it was killed or crashed, see its own output"
SILENT = "process {} gave no sign of life for 4 s: it is suspended, or its network is cut off"


@contextlib.contextmanager
def started(name, where, count=3):
    """Start `count` processes that run the function `name` of joined.py, and kill them on exit."""
    arguments = [sys.executable, str(PROGRAM), name, str(where)]
    root = {"PYTHONPATH": str(PROGRAM.parents[3])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": os.environ | root}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen([*arguments, str(index), str(count)], **pipes)) for index in range(count)]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()


def ready(processes, word="ready"):
    """Return when all processes have printed the word."""
    for process in processes:
        while (line := process.stdout.readline()) != f"{word}\n":
            assert line.startswith("[Gloo]"), process.stderr.read()


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def ending(process):
    """Exit code, what has not been read of standard output, and standard error of a process that ends by itself within a minute.

    It prints little: pipes hold it. (`communicate` would lose what `ready` has read along with its own line.)
    """
    process.stdin.close()
    process.wait(timeout=60)
    return process.returncode, process.stdout.read(), process.stderr.read()


def test_healthy_processes(tmp_path):
    with started("well", tmp_path) as processes:
        ready(processes)
        for process in processes:
            code, out, err = ending(process)
            assert (code, err) == (0, "")
            assert json.loads(out) == {
                "differences": [
                    "config differs between processes 0 and 2: 'learning_rate: 0.1' against 'learning_rate: 0.2' (line 2); "
                    "start all processes with the same config",
                    "device kind differs between processes 1 and 0: 'gpu' against 'cpu'; start all processes with the same device kind",
                ],
                "exact": True,
                "each": ["from 0", "from 1", "from 2"],
                "kept": True,  # of 150 unread ones 100, and one of these has been read; an answer that nobody had read yet counted as one
                "threads": 1,
                "waits": 0,
            }


def test_foreign_connections_are_dropped(tmp_path):
    with started("enter", tmp_path) as processes, contextlib.ExitStack() as strangers:
        processes[2].send_signal(signal.SIGSTOP)  # before it joins: until then the port is open
        deadline = time.monotonic() + 30
        while not (tmp_path / "address").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        address, token = (tmp_path / "address").read_text().split()
        place = Address.parse(address, "")

        def say(text):
            stranger = strangers.enter_context(socket.create_connection(place, timeout=30))
            stranger.sendall(text)
            return stranger

        async def call(key, number, count):
            reader, writer = await asyncio.open_connection(*place)
            with contextlib.closing(writer):
                return await handshake.call(reader, writer, key, number, count)

        for text in ("\n", '{"stop": "all"}\n', f"{token} 2\n", "\0\n", "jpipe 2 3\n"):
            assert say(text.encode()).recv(1) == b""  # dropped
        for key, number, count in (b"another", 2, 3), (handshake.key(None, token), 0, 3), (handshake.key(None, token), 2, 4):
            with contextlib.suppress(InputError):
                assert asyncio.run(call(key, number, count)).startswith("no --")
        say(b""), say(token.encode())  # these may still want to say something
        processes[2].send_signal(signal.SIGCONT)
        ready(processes)
        reasons = (
            "5 without a hello of jpipe's, 2 that said nothing in time, 1 with another secret, 1 as process 0 of 3, 1 as process 2 of 4"
        )
        message = f"10 connections were dropped ({reasons}) while the processes connected"
        for index, process in enumerate(processes):
            assert ending(process) == (0, "parted\n", "" if index else f"jpipe: {message}\n")


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize(
    ("victim", "by", "how"),
    [(2, signal.SIGKILL, ENDED), (0, signal.SIGKILL, ENDED), (2, signal.SIGSTOP, SILENT), (0, signal.SIGSTOP, SILENT)],
)
def test_a_process_that_dies_or_is_stopped_ends_all(tmp_path, victim, by, how):
    with started("wait", tmp_path) as processes:
        ready(processes)
        ready(processes, "waits")
        processes[victim].send_signal(by)
        for index in {0, 1, 2} - {victim}:
            waited = "activations 3 of process 2" if index == 1 else "gradients 4 of process 1"
            message = f"{how.format(victim)}; process {index} stops while waiting for {waited}\n"
            if index == 1 and (victim, by) != (0, signal.SIGKILL):  # it can still tell by itself
                assert ending(processes[index]) == (3, message, "")
            else:
                assert ending(processes[index]) == (1, "", f"jpipe: {message}")


def test_a_wait_that_fails_because_a_process_died_names_the_process(tmp_path):
    with started("failing", tmp_path) as processes:
        ready(processes)
        ready(processes, "waits")  # the death of process 2 is not known before that
        go_on(processes[1])
        processes[2].kill()
        assert ending(processes[1]) == (3, f"{ENDED.format(2)}; process 1 stops while waiting for the sum of process 2\n", "")


def test_a_process_that_has_reported_and_hangs_is_ended_silently(tmp_path):
    with started("slow_to_end", tmp_path) as processes:
        ready(processes)
        ready(processes, "waits")
        processes[2].kill()
        message = f"{ENDED.format(2)}; process 1 stops while waiting for activations 3 of process 2\n"
        assert ending(processes[1]) == (1, message, "")


def test_a_wait_that_exceeds_its_limit_ends_all_and_prints_the_stack_of_the_hanging_process(tmp_path):
    with started("hang", tmp_path) as processes:
        ready(processes)
        ready(processes[:2], "waits")
        endings = [ending(process) for process in processes]
    assert [code for code, _, _ in endings] == [1, 3, 1]
    stops = ["stops while waiting for gradients 4 of process 1", "stops while waiting for activations 3 of process 2", "stops"]
    for index, (_, out, err) in enumerate(endings):
        line = out + err
        assert "process 2 hangs: process " in line  # whether 0 or 1 was the first to notice
        assert int(re.search(r" has waited (\d+) s for ", line)[1]) >= 2  # the join was progress
        assert ", and process 2 is in threading.py:" in line
        assert line.endswith(f"; process {index} {stops[index]}\n")
        assert line.count("\n") == 1


def test_a_process_that_stops_reports_the_reason(tmp_path):
    with started("give_up", tmp_path) as processes:
        ready(processes)
        time.sleep(0.5)  # the others wait
        go_on(processes[0])
        how = "process 0 stopped: the disk is full; process"
        assert ending(processes[1]) == (3, f"{how} 1 stops while waiting for loss 7 of process 0\n", "")
        assert ending(processes[2]) == (3, f"{how} 2 stops while waiting for all processes to reach 'never'\n", "")
        assert ending(processes[0]) == (4, "", "")


def test_an_uncaught_error_ends_all_processes_with_its_text(tmp_path):
    with started("uncaught", tmp_path) as processes:
        ready(processes)
        time.sleep(0.3)  # the others wait
        go_on(processes[1])
        how = "process 1 stopped: ValueError: no data; process"
        messages = [
            f"jpipe.errors.PeerLost: {how} 0 stops while waiting for loss 7 of process 1",
            "ValueError: no data",
            f"jpipe: {how} 2 stops while waiting for all processes to finish",
        ]
        for process, last in zip(processes, messages, strict=True):
            code, _, err = ending(process)
            assert (code, err.splitlines()[-1]) == (1, last)


def test_a_process_that_never_joins_is_named(tmp_path):
    with started("not_all", tmp_path) as processes:
        for process in processes[:2]:
            code, _, err = ending(process)
            assert code == 1
            assert re.search(r"NotConnected: process 2 of 3 did not connect to 127\.0\.0\.1:\d+ within 1 s; check ", err.splitlines()[-1])


def test_an_address_that_cannot_be_reached_is_reported(tmp_path):
    with started("unreachable", tmp_path, count=2) as processes:
        assert ending(processes[1]) == (
            0,
            "process 1 cannot reach the coordinator, process 0, at 127.0.0.1:PORT within 1 s (connection refused); check that process 0 "
            "was started there, that the address is right and that no firewall is between; to wait longer, raise --connect-limit, or limit "
            "in Python\n",
            "",
        )


ALONE = Rendezvous(Address("", 0), 0, 1)


@pytest.mark.parametrize(
    ("coordinator", "listens"),
    [("node7:1", ("::", "0.0.0.0")), ("192.0.2.1:1", ("::", "0.0.0.0")), ("localhost:1", ("127.0.0.1",)), ("127.0.0.1:1", ("127.0.0.1",))],
)
def test_process_0_listens_where_others_reach_it(coordinator, listens):
    client = types.SimpleNamespace(key_value_set=lambda key, value: None)
    state = types.SimpleNamespace(process_id=0, num_processes=2, coordinator_address=coordinator, client=client)
    with Rendezvous.of_jax(state).open() as listener:
        assert listener.getsockname()[0] in listens


def test_a_missing_address_of_process_0_is_reported(monkeypatch):
    class Silent:
        def blocking_key_value_get(self, key, milliseconds):
            assert milliseconds == 200
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out with key: jpipe/processes/0\nmore")

    state = types.SimpleNamespace(process_id=1, num_processes=2, coordinator_address="node7:1", client=Silent())
    monkeypatch.setattr(jax_internals, "distributed_state", lambda: state)
    with pytest.raises(InputError) as caught:
        Processes.join(limit=0.2)
    assert str(caught.value) == (
        "process 1 did not get the address of process 0 within 0.2 s (DEADLINE_EXCEEDED); see what process 0 says, "
        "and let all processes of a run join at the same place"
    )


def test_a_run_of_one_process_needs_no_connections():
    processes = Processes.join(rendezvous=ALONE)
    processes.agree({"config": "any"})
    processes.barrier("start")
    processes.broadcast("loss", b"0.5")
    assert processes.receive("loss") == b"0.5"
    assert processes.gather("all", b"1") == [b"1"]
    with pytest.raises(ZeroDivisionError), processes.waiting("what fails by itself"):
        raise ZeroDivisionError
    processes.close()
    processes.close()
    assert processes._channel._thread is None


def test_unread_messages_never_push_out_what_a_process_waits_for(monkeypatch):
    monkeypatch.setattr(_membership, "_MAX_UNREAD", 3)
    processes = Processes.join(rendezvous=ALONE)
    processes._take({"met": "barrier start", "differences": []})
    for number in range(5):
        processes.broadcast(f"loss {number}", b"")
    assert ("answer", "barrier start") in processes._arrived
    assert [processes.has_message(f"loss {number}") for number in range(5)] == [False, False, False, True, True]


def test_an_error_in_a_thread_that_nobody_waits_for_is_raised_by_all_waits(monkeypatch):
    monkeypatch.setattr(_membership, "_BLAME_SECONDS", 0.0)

    def fails():
        return [1 / 0]

    for thread in (
        lambda processes: _transport.TransferThread().put(fails, (), processes.fail),
        lambda processes: _metrics._send(processes, "loss", fails),
    ):
        processes = Processes.join(rendezvous=ALONE)
        thread(processes)
        with pytest.raises(ZeroDivisionError):
            processes.receive("loss")
        with pytest.raises(ZeroDivisionError):
            _transport.PendingTransfer(Future(), "the activation", (), processes, tuple).wait()


def test_the_end_of_a_wait_is_progress_and_a_wait_names_all_processes():
    processes = Processes.join(rendezvous=ALONE)
    before = [processes._waits.beat().still for _ in range(2)]
    with processes.waiting("the sum", (1, 2)):
        assert str(processes._waits.longest()) == "the sum of processes 1, 2"
    assert [*before, processes._waits.beat().still, processes._waits.beat().still] == [1.0, 2.0, 0.0, 1.0]


def test_a_received_part_has_its_declared_size():
    spec = np.zeros(3, np.float32), np.zeros(5, np.float64)
    coming = _transport.PendingTransfer(Future(), "", (), Processes.join(rendezvous=ALONE), lambda: {7: spec})
    assert [part.nbytes for part in (coming, coming[7], coming[7][0], coming[7][1])] == [52, 52, 12, 40]


def test_a_sending_thread_that_cannot_start_is_reported(monkeypatch):
    async def fails(*_):
        raise OSError("too many open files")

    monkeypatch.setattr(Channel, "_run", fails)
    with pytest.raises(OSError, match="too many open files"):
        Processes.join(rendezvous=Rendezvous(Address("127.0.0.1", free_port()), 0, 2))


# With JAX: its coordinator lives in process 0, and it aborts the others soon after that has died.


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.mark.slow
def test_with_jax_the_message_comes_before_its_abort_when_the_coordinator_dies():
    with started("jax_collective", free_port()) as processes:
        ready(processes)
        time.sleep(0.5)  # the others are in the collective
        processes[0].kill()
        for index in (1, 2):
            code, _, err = ending(processes[index])
            assert code == 1
            assert f"jpipe: {ENDED.format(0)}; process {index} stops while waiting for the sum" in err.splitlines()  # JAX talks too


@pytest.mark.exhaustive
def test_processes_with_jax_exit_normally():
    with started("jax_collective", free_port()) as processes:
        ready(processes)
        go_on(processes[0])
        for process in processes:
            code, out, _ = ending(process)
            assert (code, out) == (0, "parted\n")


# What process 0 decides, without processes.


def beats(desk, *of_processes):
    return [desk.answer(process, {"beat": vars(beat)}) for process, beat in enumerate(of_processes)]


def test_the_end_of_a_chain_of_waits_is_blamed():
    desk = Coordinator(4)
    beats(desk, Beat("", "gradients 0", (1,), 44.0), Beat("", "gradients 1", (2,), 44.0), Beat("c.py:3 (h)", "z", (3,), 0.2), Beat(""))
    overdue = Beat("", "gradients 0", (1,), 46.0, 45.0)
    assert desk.answer(0, {"beat": vars(overdue)}) == {
        "lost": "process 2 hangs: process 0 has waited 46 s for gradients 0, and process 2 is in c.py:3 (h)",
    }


def test_no_process_is_blamed_while_arrays_are_transferred():
    desk, waits = Coordinator(2), Beat("", "gradients 0", (1,), 100.0, 45.0, still=100.0)
    beats(desk, Beat("", still=0.0), Beat("c.py:3 (h)", still=44.0))
    assert desk.answer(0, {"beat": vars(waits)}) is None
    desk.answer(1, {"beat": vars(Beat("c.py:3 (h)", still=46.0))})
    assert desk.answer(0, {"beat": vars(waits)}) == {
        "lost": "process 1 hangs: process 0 has waited 100 s for gradients 0, and process 1 is in c.py:3 (h)",
    }


def test_the_process_missing_in_a_sum_is_blamed():
    desk, sums = Coordinator(4), "the sum"
    beats(desk, Beat("", sums, (1, 2), 44.0), Beat("", sums, (0, 2), 44.0), Beat("d.py:4 (i)"), Beat("", "activations 1", (0,), 44.0))
    for waiter, on in ((0, (1, 2)), (3, (0,))):
        awaited = Beat("", sums, on, 46.0, 45.0)
        assert desk.answer(waiter, {"beat": vars(awaited)}) == {
            "lost": f"process 2 hangs: process {waiter} has waited 46 s for the sum, and process 2 is in d.py:4 (i)",
        }


def test_a_process_that_announces_a_long_computation_is_waited_for():
    desk, waits = Coordinator(2), Beat("", "gradients 0", (1,), 100.0, 45.0)
    beats(desk, waits, Beat("c.py:3 (h)", "the file to be written", (), 100.0, 200.0))
    assert desk.answer(0, {"beat": vars(waits)}) is None
    beats(desk, Beat(""), Beat("c.py:3 (h)", "the file to be written", (), 201.0, 300.0))
    assert desk.answer(1, {"beat": vars(Beat("c.py:3 (h)", "the file to be written", (), 201.0, 200.0))}) == {
        "lost": "process 1 has waited 201 s for the file to be written",
    }
    desk.answer(1, {"beat": vars(Beat("c.py:3 (h)", "a meeting with process 0", (0,), 100.0, 600.0))})
    assert "process 1 hangs" in desk.answer(0, {"beat": vars(waits)})["lost"]


def test_processes_that_wait_for_each_other_report_a_deadlock():
    desk = Coordinator(2)
    assert beats(desk, Beat("", "gradients 0", (1,), 30.0), Beat("", "activations 1", (0,), 46.0, 45.0))[1] == {
        "lost": "process 0 hangs: process 1 has waited 46 s for activations 1, and process 0 waits for gradients 0",
    }


def test_a_barrier_waits_for_absent_processes_only():
    desk = Coordinator(2)
    assert desk.answer(0, {"meet": "barrier start", "facts": {}}) is None
    answers = beats(desk, Beat("", "all processes to reach 'start'", (), 601.0, 600.0), Beat("", "loss 3", (), 601.0, 600.0))
    assert answers == [
        {"lost": "process 1 has not joined: process 0 has waited 601 s for all processes to reach 'start'"},
        {"lost": "process 1 has waited 601 s for loss 3"},
    ]


def test_only_the_difference_of_long_texts_is_shown():
    desk = Coordinator(3)
    plan = json.dumps({"layers": [f"layer{k}" for k in range(1000)]})
    desk.answer(2, {"meet": "agreement", "facts": {"plan": plan.replace("layer700", "layer_700")}})
    desk.answer(1, {"meet": "agreement", "facts": {"plan": plan, "jax version": "1"}})
    answer = desk.answer(0, {"meet": "agreement", "facts": {"plan": plan}})
    assert answer == {
        "met": "agreement",
        "differences": [
            "plan differs between processes 0 and 2: "
            """'ayer697", "layer698", "layer699", "layer700", "layer701", "layer702", "layer703"' against """
            """'ayer697", "layer698", "layer699", "layer_700", "layer701", "layer702", "layer703'; start all processes with the """
            "same plan",
            "jax version differs between processes 0 and 1: '' against '1'; start all processes with the same jax version",
        ],
    }


def test_processes_that_state_other_facts_than_most_are_named():
    desk = Coordinator(4)

    def compare(name, *facts, hint="pass the same"):
        answers = [desk.answer(process, {"meet": name, "facts": fact, "hint": hint}) for process, fact in enumerate(facts)]
        assert answers[:-1] == [None] * 3, "nobody is named before all have come"
        return answers[-1]

    same = {"shape": "[2]", "checksum": "a"}
    assert compare("batch 0", same, same, same, same) is None
    assert compare("batch 8", {**same, "checksum": ""}, same, {"shape": "[2]"}, same) is None, (
        "what one does not know it cannot pass wrongly"
    )
    answer = compare("batch 16", {**same, "checksum": "b"}, same, {**same, "checksum": "c"}, same)
    assert answer == {"refused": "checksum differs between processes 1 and 0, 2: 'a' against 'b'; pass the same"}
    answer = compare("batch 24", same, same, {"shape": "[3]", "checksum": "c"}, {"shape": "[3]", "checksum": "c"})
    assert answer == {"refused": "shape differs between processes 0 and 2, 3: '[2]' against '[3]'; pass the same"}
    assert compare("batch 24", same, same, same, same) is None, "a comparison that is over is forgotten"


def test_a_process_that_finishes_before_the_others_is_named():
    desk = Coordinator(2)
    desk.answer(1, {"meet": "batch 8", "facts": {}, "hint": "pass it in all"})
    assert desk.answer(1, {"meet": "the end", "facts": {}}) is None
    assert desk.finished() == {1}
    assert desk.answer(0, {"meet": "the end", "facts": {}}) == {"refused": "only process 1 came to batch 8; pass it in all"}
    desk = Coordinator(3)
    assert desk.answer(2, {"meet": "the end", "facts": {}}) is None
    assert desk.answer(0, {"meet": "agreement", "facts": {}}) == {
        "refused": "process 2 has finished, and 'agreement' of process 0 waits for it; "
        "call the same methods of the pipeline in all processes"
    }
