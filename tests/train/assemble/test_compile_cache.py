"""Compiled programs are cached for the next run in a folder of the user."""

import os
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jpipe import InputError
from jpipe_train.assemble import compile_cache
from jpipe_train.report.metrics_log import repeatable
from jpipe_train.run import loop
from tests.train.conftest import changed
from tests.train.run.test_loop import rows_of


@pytest.fixture
def no_cache(monkeypatch, tmp_path, nothing_shared):
    """Reset the compilation cache, as in a fresh process of a user with this home folder."""
    before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def forget() -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache", "no_report")
def test_the_second_run_reads_its_programs_from_the_cache_with_equal_numbers(tiny, tmp_path, capsys):
    rows, lines = [], []
    for name in ("first", "second"):
        of_run = {"run": {"dir": str(tmp_path / name)}, "train": {"trace_batches": 0}, "optimizer": {"name": "sgd"}}
        summary = loop.main(changed(tiny, **of_run))
        rows.append([repeatable(row) for row in rows_of(summary.folder)])
        lines.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("compiling 2 stages: ")))
        (folder,) = (tmp_path / "home" / ".cache" / "jpipe").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        forget()
    assert rows[0] == rows[1]
    assert "(from the cache)" not in lines[0]
    assert lines[1].endswith(" s (from the cache)")


@pytest.mark.usefixtures("no_cache")
def test_null_keeps_nothing_and_a_folder_given_to_jax_stays(tiny, tmp_path):
    assert compile_cache.use(None) is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "given"))
    compile_cache.use("auto")
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "given")
    assert not (tmp_path / "home").exists()
    assert changed(tiny | {"compile_cache": None}).compile_cache is None


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("how", ["others can write", "a link", "a file", "another's"])
def test_a_cache_folder_of_another_user_is_not_used(how, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    if how == "others can write":
        folder.mkdir()
        folder.chmod(0o777)
    elif how == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere").chmod(0o770)
    elif how == "a file":
        folder.touch()
    else:
        folder.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InputError, match=r"compile_cache: '.*' cannot be used: .*; choose another folder, or null"):
        compile_cache.use(str(folder))
    monkeypatch.setattr(compile_cache, "_default", lambda: folder)
    warning = compile_cache.use("auto")
    assert warning is not None
    assert warning.endswith("; compiled programs are not kept")
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_the_oldest_programs_beyond_the_limit_are_removed(tmp_path, monkeypatch):
    for age, name in enumerate(["new", "middle", "old"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    monkeypatch.setattr(compile_cache, "_LARGEST", 250)
    compile_cache._remove_oldest(Path(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "new"]


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_a_home_that_is_not_utf8_keeps_nothing_and_says_so(variable, monkeypatch, tmp_path):
    folder = f"{tmp_path}/\udcff"
    monkeypatch.setenv(variable, folder)
    warning = compile_cache.use("auto")
    assert warning is not None
    assert warning.endswith(
        "\\xff" + ("/.cache" if variable == "HOME" else "") + "' cannot be used: its name is not UTF-8; compiled programs are not kept"
    )
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert not os.path.exists(folder)
