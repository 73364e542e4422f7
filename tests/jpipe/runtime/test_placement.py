"""The placement of workers on mock devices."""

import re
from unittest.mock import NonCallableMock

import jax
import pytest

from jpipe import InputError, Plan
from jpipe.runtime._placement import place, placement_grid


@pytest.fixture
def machines(monkeypatch):
    """Return a function that replaces `jax.devices` by mocks: the number of devices of each process, and their kinds."""

    def set_devices(*counts, kinds=("cpu",)):
        owners = [process for process, count in enumerate(counts) for _ in range(count)]
        devices = [
            NonCallableMock(spec=jax.Device, process_index=p, id=10 + number, platform="cpu", device_kind=kinds[p % len(kinds)])
            for number, p in enumerate(owners)
        ]
        monkeypatch.setattr(jax, "devices", lambda: devices[::-1])  # JAX does not say that they come by process
        monkeypatch.setattr(jax, "process_count", lambda: len(counts))
        return devices

    return set_devices


def plan_of(*replicas, **fields) -> Plan:
    return Plan.even("abcdefgh", len(replicas), "pipedream", 12, replicas=replicas, **fields)


def numbers(plan, devices=None) -> list[int]:
    """Return the number of each worker's first device, counted over all processes."""
    return [place_.first.id - 10 for place_ in place(plan, devices)]


@pytest.mark.parametrize(
    ("counts", "replicas", "by_replicas", "by_stages"),
    [
        ((1,), (1, 1), [0, 0], [0, 0]),
        ((8,), (1, 1, 1), [0, 1, 2], [0, 1, 2]),
        ((1, 1, 1), (1, 1, 1), [0, 1, 2], [0, 1, 2]),
        ((2, 2), (2, 2), [0, 1, 2, 3], [0, 2, 1, 3]),
        ((3, 1), (2, 1, 1), [0, 1, 2, 3], [0, 3, 1, 2]),
        ((2, 2), (1, 3), [0, 1, 2, 3], [0, 1, 2, 3]),
        ((2, 1), (2, 2), [0, 0, 1, 2], [0, 1, 0, 2]),
        ((4,), (3, 3), [0, 0, 1, 2, 2, 3], [0, 1, 2, 0, 2, 3]),
    ],
)
def test_neighbours_are_those_that_the_plan_keeps_together(machines, counts, replicas, by_replicas, by_stages):
    machines(*counts)
    assert numbers(plan_of(*replicas)) == by_replicas
    assert numbers(plan_of(*replicas, keep_together="replicas")) == by_replicas
    assert numbers(plan_of(*replicas, keep_together="stages")) == by_stages


@pytest.mark.parametrize("together", ["replicas", "stages"])
def test_devices_are_used_as_they_are_named(machines, together):
    machines(2, 2)
    assert numbers(plan_of(2, 1, 2, placement=[[3, 0], [0], [2, 2]], keep_together=together)) == [3, 0, 0, 2, 2]
    devices = machines(2)
    assert numbers(plan_of(1, 2, placement=[[0], [0, 0]], keep_together=together), [devices[1], devices[0], devices[1]]) == [1, 0, 1]


def refused(plan, devices=None) -> list[str]:
    with pytest.raises(InputError) as refusal:
        place(plan, devices)
    return [str(line) for line in refusal.value.args]


def test_fewer_workers_than_devices_are_refused_in_a_run_of_several_processes(machines):
    machines(2, 3)
    assert refused(plan_of(2, 1)) == [
        "plan: expected at least as many ranks as devices in a run of 2 processes, found 3 ranks for 5 devices; "
        "change stages, replicas or the number of processes, or name the devices in placement",
        "workers:",
        "  stage 0: w0 w1",
        "  stage 1: w2",
        "devices:",
        "  process 0: cpu:0 cpu:1",
        "  process 1: cpu:2 cpu:3 cpu:4",
    ]
    assert numbers(plan_of(2, 1, placement=[[0, 1], [2]])) == [0, 1, 2]


def test_a_missing_device_is_refused(machines):
    machines(1, 1)
    assert refused(plan_of(1, 2, placement=[[0], [1, 2]])) == [
        "plan: placement: it names device 2, but there are only 2 (0 to 1); choose one of these",
        "workers:",
        "  stage 0: w0",
        "  stage 1: w1 w2",
        "devices:",
        "  process 0: cpu:0",
        "  process 1: cpu:1",
    ]


def test_a_process_without_a_worker_is_refused(machines):
    machines(1, 1, 2)
    assert refused(plan_of(1, 2, placement=[[3], [2, 0]])) == [
        "plan: expected a worker in every process, found none in process 1; place a worker there, or start fewer processes",
        "         replica 0    replica 1",
        "stage 0  w0 p2 cpu:3",
        "stage 1  w1 p2 cpu:2  w2 p0 cpu:0",
    ]
    devices = machines(1, 1)
    assert "found none in process 0;" in refused(plan_of(1, 1), [devices[1]] * 2)[0]


def test_devices_of_different_kinds_are_refused(machines):
    devices = machines(1, 1, kinds=("Fast 80GB", "Slow"))
    expected = ["devices: expected devices of one kind, found 'Fast 80GB' (process 0) and 'Slow' (process 1); run on one kind of device"]
    assert refused(plan_of(1, 1)) == expected
    assert refused(plan_of(1, 1, placement=[[1], [0]])) == expected
    assert refused(plan_of(1, 2), [devices[0], devices[1], devices[1]]) == expected


def test_the_number_of_devices_must_be_the_number_of_workers(machines):
    devices = machines(4)
    assert refused(plan_of(1, 1), devices[:1]) == ["devices: expected 2, one for each stage, found 1"]
    assert refused(plan_of(2, 1), devices) == ["devices: expected 3, one for each rank, found 4"]


def test_the_grid_has_a_row_for_each_stage_and_a_column_for_each_replica(machines):
    plan = plan_of(2, 1, 3, placement=[[0, 1], [1], [2, 2, 0]])
    machines(1, 2)
    text = placement_grid(plan, place(plan))
    assert [re.split("  +", line) for line in text.splitlines()] == [
        ["", "replica 0", "replica 1", "replica 2"],
        ["stage 0", "w0 p0 cpu:0", "w1 p1 cpu:1"],
        ["stage 1", "w2 p1 cpu:1"],
        ["stage 2", "w3 p1 cpu:2", "w4 p1 cpu:2", "w5 p0 cpu:0"],
    ]
    assert {line.find("w0") for line in text.splitlines()} == {-1, text.splitlines()[0].find("replica 0")}
    machines(3)  # of one process: its number tells nothing
    assert placement_grid(plan, place(plan)).splitlines()[1:] == [
        "stage 0  w0 cpu:0   w1 cpu:1",
        "stage 1  w2 cpu:1",
        "stage 2  w3 cpu:2   w4 cpu:2   w5 cpu:0",
    ]
