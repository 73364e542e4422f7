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
    return devices_of(target, 1)


@pytest.fixture
def two_hosts(target):
    """Return one device in each of two processes, the first of them this one."""
    devices = devices_of(target, 2)
    return tuple(next(device for device in devices if device.process_index == process) for process in range(2))


def devices_of(target, processes):
    try:
        return target_devices(target, 8, processes)
    except TargetUnavailable as error:
        if os.environ.get("JPIPE_REQUIRE_TARGETS"):
            raise
        pytest.skip(str(error))
