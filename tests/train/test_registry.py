"""What installed packages add: found by name, imported when it is named, and a line for each mistake in a package."""

import re
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from jpipe import InputError
from jpipe_train import cli, commands, registry
from jpipe_train.config import config_file
from tests.packages import ROOT

PAGE = ROOT / "docs" / "how-to" / "packages.md"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package of one module, given its entry points and its code."""

    def forget() -> None:
        registry.entries.cache_clear()
        registry._clone.cache_clear()
        commands._added.cache_clear()

    def install(name: str, groups: dict[str, dict[str, str]], code: str = "") -> None:
        folder = tmp_path / f"site-{name}"
        info = folder / f"{name}-0.1.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        lines = [
            line for group, members in groups.items() for line in (f"[{group}]", *(f"{key} = {value}" for key, value in members.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(folder)
        forget()

    yield install
    monkeypatch.undo()
    forget()


def blocks(language: str) -> str:
    """Return the only block of a language in the page."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.usefixtures("no_report")
def test_the_package_of_the_page_adds_a_model_and_a_format(installed, tmp_path, monkeypatch, capsys):
    project = tomllib.loads(blocks("toml"))["project"]
    assert len(blocks("python").splitlines()) < 60
    installed(project["name"], project["entry-points"], blocks("python"))
    monkeypatch.chdir(tmp_path)
    series = np.sin(np.arange(400) / 5).astype(np.float32)
    np.savetxt("sine.txt", series)
    Path("config.yaml").write_text(blocks("yaml"))
    jax.devices()  # as many as the tests have, before a command asks for more
    assert cli.main(["train", "config.yaml"]) == 0
    rows = [yaml.safe_load(line) for line in Path("forecast-run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] / 10
    written = yaml.safe_load(Path("forecast-run/config.yaml").read_text())
    assert written["model"] == {"target": None, "arguments": {}, "kind": "forecaster", "seq_len": 128, "window": 8, "width": 32}
    assert config_file.load("forecast-run/config.yaml", ["model.width=8"]).model.width == 8
    np.savetxt("other.txt", series[100:200])
    capsys.readouterr()
    assert cli.main(["evaluate", "forecast-run", "--data", "other.txt"]) == 0
    assert "over 92" in capsys.readouterr().out
    assert cli.main(["train", "config.yaml", "--set", "model.depth=3", "--set", "run.dir=two"]) == 2
    assert "unknown key 'model.depth'; " in capsys.readouterr().err


def test_the_page_lists_every_group():
    assert re.findall(r"^\| `jpipe\.(\w+)` \|", PAGE.read_text(), re.MULTILINE) == list(registry.GROUPS)


def test_a_name_that_two_packages_add_is_an_error_that_names_both(installed):
    installed("one", {"jpipe.models": {"conv": "one:Conv"}})
    installed("two", {"jpipe.models": {"conv": "two:Conv"}})
    with pytest.raises(InputError) as caught:
        registry.find("models", "decoder")
    assert re.fullmatch(
        r"model\.kind conv: expected one package that adds it, found (one|two):Conv of the package \1 and (one|two):Conv of the package "
        r"\2; uninstall one of them",
        str(caught.value),
    )


def test_a_package_that_cannot_be_imported_is_named_in_one_line(installed, tmp_path, monkeypatch, capsys):
    installed("broken", {"jpipe.models": {"conv": "broken:Conv"}, "jpipe.commands": {"paint": "broken:paint"}}, "import no_such_module")
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("model: {kind: conv}")
    reason = "ModuleNotFoundError: No module named 'no_such_module'; correct the module, or uninstall the package"
    assert cli.main(["train", "config.yaml"]) == 2
    assert capsys.readouterr().err == f"jpipe: config.yaml: model: broken:Conv of the package broken cannot be imported: {reason}\n"
    assert cli.main(["paint"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0


def test_commands_of_packages_run_and_do_not_replace_others(installed, capsys):
    code = 'def paint(colour: str = \'red\') -> int:\n    """Paint."""\n    print(colour)\n    return 3\n'
    installed("painter", {"jpipe.commands": {"paint": "painter:paint"}}, code)
    assert cli.main(["paint", "--colour", "blue"]) == 3
    assert capsys.readouterr().out == "blue\n"
    installed("other", {"jpipe.commands": {"train": "other:train"}})
    assert cli.main(["paint"]) == 2
    assert (
        "other:train of the package other adds the command train, which jpipe has already; uninstall the package" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("group", "name", "message"),
    [
        ("models", "decodr", "unknown kind 'decodr'; did you mean 'decoder'?"),
        ("formats", "txt", "unknown format 'txt'; did you mean 'text'?"),
        ("layouts", "hugingface", "unknown layout 'hugingface'; did you mean 'huggingface'?"),
    ],
)
def test_an_unknown_name_is_reported_with_the_nearest_one(group, name, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        registry.find(group, name)


def test_a_clone_has_its_own_entry_points_whatever_was_installed(installed, monkeypatch, tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "jpipe-train"
    for group in registry.GROUPS:
        assert {name: entry.value for name, entry in registry.entries(group).items()} == project["entry-points"][f"jpipe.{group}"]
    monkeypatch.setattr(registry, "_CLONE", tmp_path / "pyproject.toml")  # as from a wheel
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "of a user"\n[project.entry-points."jpipe.losses"]\nmine = "a:b"\n')
    installed("jpipe_train", {"jpipe.losses": {"installed": "a:b"}})
    assert registry.names("losses") == ("installed",)
