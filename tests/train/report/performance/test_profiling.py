"""Profiles of some steps for XProf: when the profiler runs, what is left of a problem, and the keys of the config."""

import jax
import pytest

from jpipe import InputError
from jpipe_train.config import config_file
from jpipe_train.config.config import ProfileConfig, TrainConfig
from jpipe_train.report.performance.xprof import Profiler
from jpipe_train.run import loop
from tests.train.conftest import changed

THREE = ProfileConfig.model_validate({"from": 2, "steps": 3})


@pytest.fixture
def profiler(tmp_path, monkeypatch):
    """Return a profiler of process 1, with the calls of JAX's profiler and the lines that it prints."""
    calls, lines = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(folder.name))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return Profiler(THREE, tmp_path / "run", 1, lines.append), calls, lines


def test_the_chosen_steps_are_profiled(profiler, tmp_path):
    profiler, calls, lines = profiler
    seen = []
    for step in range(7):
        profiler.before(step, ())
        seen.append(len(calls))
    assert (calls, seen) == (["process-1", "stop"], [0, 0, 1, 1, 1, 2, 2])
    assert lines == [f"profile: steps 2 to 4 are in {tmp_path / 'run' / 'profile'}"]


def test_a_run_that_resumes_or_ends_inside_profiles_the_rest(profiler):
    profiler, calls, lines = profiler
    profiler.before(4, ())
    profiler.after(5, ())
    profiler.close()
    assert calls == ["process-1", "stop"]
    for steps in ((2, 3), (3,)):
        for step in steps:
            profiler.before(step, ())
        profiler.after(4, ())
    profiler.before(2, ())
    profiler.close()
    profiler.after(2, ())
    words = ["profile: step 4 is", "profile: steps 2 to 3 are", "profile: step 3 is", "profile: the beginning of step 2 is"]
    assert [line.partition(" in ")[0] for line in lines] == words
    assert calls == ["process-1", "stop"] * 4


def test_a_profile_that_cannot_be_written_is_reported_once(profiler, tmp_path):
    profiler, calls, lines = profiler
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(tmp_path)
    for step in range(7):
        profiler.before(step, ())
    assert calls == []
    assert len(lines) == 1
    assert lines[0].endswith("it is a symbolic link, which jpipe does not follow there; the run continues without a profile")


def test_the_keys_are_read_and_written_back(tmp_path):
    (tmp_path / "c.yaml").write_text("train: {profile: {from: 2}}\n")
    config = config_file.load(tmp_path / "c.yaml", ["train.profile.steps=4"])
    assert config.train.profile == ProfileConfig.model_validate({"from": 2, "steps": 4})
    (tmp_path / "again.yaml").write_text(config_file.to_yaml(config))
    assert "profile:\n    from: 2\n    steps: 4\n" in (tmp_path / "again.yaml").read_text()
    assert config_file.load(tmp_path / "again.yaml") == config
    assert TrainConfig().profile is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{from: 198}", "train: profile: expected steps up to 199, the last one of the run, found 198 to 200"),
        ("{from: -1}", "train.profile.from: expected greater than or equal to 0, found -1"),
        ("{steps: 2}", "key 'train.profile.from' is missing; add it"),
        ("{from: 1, step: 2}", "unknown key 'train.profile.step'; did you mean 'train.profile.steps'?"),
        ("{form: 1}", "unknown key 'train.profile.form'; did you mean 'train.profile.from'?"),
    ],
)
def test_wrong_keys_are_reported(tmp_path, keys, message):
    (tmp_path / "c.yaml").write_text(f"train: {{profile: {keys}}}\n")
    with pytest.raises(InputError) as raised:
        config_file.load(tmp_path / "c.yaml")
    assert message in str(raised.value)


@pytest.mark.slow
def test_a_run_leaves_a_profile_for_xprof(tiny):
    folder = loop.main(changed(tiny | {"log": []}, train={"profile": {"from": 1, "steps": 2}})).folder
    (file,) = (folder / "profile").rglob("*.xplane.pb")
    assert file.relative_to(folder / "profile").parts[:3] == ("process-0", "plugins", "profile")
