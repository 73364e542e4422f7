"""The targets that tests compile for: skipped where XLA's compiler for one is not installed, unless `make test-targets` requires it."""

import os

import pytest

from jpipe_planner.machine.targets import TargetUnavailable, find_target, target_devices

NAMES = ("h100-80gb", "v5e")


@pytest.fixture(autouse=True)
def apart(nothing_shared):
    """Trace and compile each test's own stages: what is traced for one platform is not for another."""


@pytest.fixture(params=NAMES)
def target(request):
    """Return a target."""
    return find_target(request.param)


@pytest.fixture
def devices(target):
    """Return eight devices of the target, which are not here."""
    return devices_of(target)


@pytest.fixture
def two_hosts(target):
    """Return the devices of each of two processes, the first of them this one."""
    return hosts_of(target, 2)


def hosts_of(target, processes):
    """Return the devices of each process."""
    if target.platform == "tpu" and processes > 2:
        target = target.model_copy(update={"compiler": {**target.compiler, "topology": "v5e:4x4"}})
    devices = devices_of(target, processes)
    return [[device for device in devices if device.process_index == process] for process in range(processes)]


def devices_of(target, processes=1):
    """Return eight devices, of more processes four of each, or skip the test where XLA cannot compile for them."""
    try:
        return target_devices(target, max(8, 4 * processes), processes)
    except TargetUnavailable as error:
        if os.environ.get("JPIPE_REQUIRE_TARGETS"):
            raise
        pytest.skip(str(error))
