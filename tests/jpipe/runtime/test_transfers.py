"""The transport that messages use between mock devices and processes."""

import contextlib
import types
from unittest.mock import NonCallableMock

import jax
import pytest

from jpipe.meshes import Place
from jpipe.processes import Processes
from jpipe.processes._connections import Connection, DevicePutConnection
from jpipe.runtime import _transport
from jpipe.runtime._transport import Transport


def device(process: int, platform: str) -> jax.Device:
    return NonCallableMock(spec=jax.Device, process_index=process, id=process, platform=platform, device_kind=platform)


@pytest.mark.parametrize(
    ("platform", "works_locally", "works_at_peer", "way"),
    [
        ("gpu", True, True, "device_put"),
        ("gpu", True, False, "collectives"),
        ("gpu", False, True, "collectives"),
        ("cpu", True, True, "collectives"),
    ],
)
def test_device_put_sends_messages_where_it_works_between_all_processes(platform, works_locally, works_at_peer, way, monkeypatch):
    pair = device(0, platform), device(1, platform)
    tried = []
    processes = NonCallableMock(spec=Processes, index=0, count=2)
    processes.waiting = lambda *_: contextlib.nullcontext()
    processes.gather = lambda name, data: [data, b"yes" if works_at_peer else b"no"]

    def works() -> bool:
        tried.append(pair)
        return works_locally

    collective, by_device_put = NonCallableMock(spec=Connection), NonCallableMock(spec=DevicePutConnection)
    by_device_put.works = works
    monkeypatch.setattr(_transport, "link_between", lambda *_: collective)
    monkeypatch.setattr(_transport, "device_put_between", lambda *_: by_device_put)
    transport = Transport([Place((one,)) for one in pair], [[0], [1]], processes, threads=False)
    transport._used = {pair: collective}
    transport.connect("pipeline 0")
    assert transport.way == way
    assert transport._link(pair) is (by_device_put if way == "device_put" else collective)
    assert tried == ([] if platform == "cpu" else [pair])


def test_connections_that_cannot_be_made_hint_at_strangers(monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo context initialization failed: Connection closed by peer\nmore")

    transport = object.__new__(_transport.Transport)
    transport._places, transport._used = (), {0: types.SimpleNamespace(connect=None)}
    monkeypatch.setattr(_transport.Transport, "_call", fail)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"^the processes cannot be connected: UNKNOWN: .* by peer; gloo and .* a port scanner, .*; "
    ):
        transport.connect("pipeline 0")
