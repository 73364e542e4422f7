"""JAX is kept from starting plugins only where all of them lack their devices, and the user has named no platforms."""

import os
import sys

import pytest

from jpipe_train.console import platforms

CUDA = {"jax_plugins.xla_cuda13"}


@pytest.fixture
def named(monkeypatch):
    """Return what JAX_PLATFORMS is for these plugins and devices, in a process that has not imported JAX."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delitem(sys.modules, "jax")

    def named(plugins=frozenset(), libtpu=False, devices=(), driver=False) -> str | None:
        monkeypatch.setattr(platforms, "_plugins", lambda: set(plugins))
        monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: {"libtpu": libtpu}[name] or None)
        monkeypatch.setattr(platforms.glob, "glob", lambda pattern: [device for device in devices if device.startswith(pattern[:8])])

        def load(name):
            if not driver:
                raise OSError(name)

        monkeypatch.setattr(platforms.ctypes, "CDLL", load)
        platforms.name_platforms()
        return os.environ.pop("JAX_PLATFORMS", None)

    return named


def test_plugins_without_devices_are_not_started(named):
    assert named(CUDA) == "cpu"
    assert named(libtpu=True) == "cpu"
    assert named(CUDA, libtpu=True) == "cpu"


def test_nothing_is_changed_where_a_device_may_be(named):
    assert named() is None
    assert named(CUDA, driver=True) is None
    assert named(CUDA, devices=["/dev/nvidia0"]) is None, "a GPU whose driver is broken: JAX says so"
    assert named(libtpu=True, devices=["/dev/accel0"]) is None
    assert named(libtpu=True, devices=["/dev/vfio/0"]) is None
    assert named(CUDA, libtpu=True, devices=["/dev/accel0"]) is None
    assert named(CUDA, libtpu=True, driver=True) is None
    assert named({*CUDA, "jax_plugins.another"}) is None


def test_platforms_that_the_user_names_are_kept(named, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert named(CUDA) == ""


def test_a_process_that_has_imported_jax_is_left_alone(named, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", object())
    assert named(CUDA) is None


def test_plugins_are_found_as_jax_finds_them(tmp_path, monkeypatch):
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").touch()
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "METADATA").write_text("Name: other\n")
    (tmp_path / "other-1.dist-info" / "entry_points.txt").write_text("[jax_plugins]\nanother = other.plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    assert platforms._plugins() >= {"jax_plugins.xla_cuda13", "other.plugin"}
