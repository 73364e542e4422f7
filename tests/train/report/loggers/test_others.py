"""trackio and MLflow: what their libraries are called with, for new and for resumed runs; their own packages are not needed."""

import json
import sys

import pytest

from jpipe import InputError
from jpipe_train.report import logs
from jpipe_train.report.loggers.sender import Sender
from tests.train.conftest import changed

TRACKIO = """
import json
def note(*call):
    with open("calls", "a") as file: print(json.dumps(call), file=file)
class Run:
    def log(self, row, step): note("log", row, step)
    def finish(self): note("finish")
def init(**options):
    note("init", options)
    return Run()
"""
MLFLOW = """
import json, types
def note(*call):
    with open("calls", "a") as file: print(json.dumps(call), file=file)
class Param:
    def __init__(self, key, value): self.key, self.value = key, value
class Metric:
    def __init__(self, key, value, timestamp, step): self.key, self.value, self.step = key, value, step
entities = types.SimpleNamespace(Param=Param, Metric=Metric)
def run(): return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
def logged():
    with open("calls") as file: return [json.loads(line) for line in file if line.startswith('["batch"')]
class MlflowClient:
    def search_runs(self, experiments, text):
        note("search", experiments, text)
        return [run()] if logged() else []
    def create_run(self, experiment, run_name, tags):
        note("create", experiment, run_name, tags)
        return run()
    def update_run(self, run, status): note("update", run, status)
    def log_batch(self, run, metrics=(), params=()):
        note("batch", run, [[m.key, m.value, m.step] for m in metrics], [[p.key, p.value] for p in params])
    def get_metric_history(self, run, key):
        return [types.SimpleNamespace(step=step) for _, _, metrics, _ in logged() for k, _, step in metrics if k == key]
    def set_terminated(self, run, status): note("end", run, status)
def set_experiment(name): return types.SimpleNamespace(experiment_id=f"id of {name}")
def get_tracking_uri(): return "sqlite:///here"
"""
CONFIG = {"seed": 7, "model": {"width": 8, "kind": "decoder"}}


@pytest.fixture
def send(tmp_path, monkeypatch):
    """Return a function that sends the losses of some steps through a package with this source, and gives its calls and the lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    (tmp_path / "packages").mkdir()

    def send(service, source, steps, code=0):
        (tmp_path / "packages" / f"{service}.py").write_text(source)
        monkeypatch.delitem(sys.modules, service, raising=False)
        (tmp_path / "calls").touch()
        lines = []
        sender = Sender(service, tmp_path / "run", CONFIG, lines.append)
        for step in steps:
            sender.write(step, {"loss": 5.0 - step, "seconds": 1.0})
        sender.close(code)
        return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()], lines

    return send


def test_trackio_gets_the_config_the_rows_and_the_end(send, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    calls, lines = send("trackio", TRACKIO, range(2))
    name = f"run {(tmp_path / 'run' / 'trackio' / 'id.txt').read_text().strip()}"
    assert calls == [
        ["init", {"project": "mine", "name": name, "config": CONFIG, "resume": "allow", "embed": False}],
        *(["log", {"loss": 5.0 - step, "seconds": 1.0}, step] for step in range(2)),
        ["finish"],
    ]
    assert lines == [f"trackio: trackio show --project mine shows the run as {name}"]
    assert send("trackio", TRACKIO, [2])[0][4][1]["name"] == name  # when the run is resumed


def test_mlflow_gets_the_parameters_once_and_each_row_once(send, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    calls, lines = send("mlflow", MLFLOW, range(2), code=1)
    id = (tmp_path / "run" / "mlflow" / "id.txt").read_text().strip()
    search = ["search", ["id of jpipe"], f"tags.jpipe_id = '{id}'"]
    rows = [["batch", "r1", [["loss", 5.0 - step, step], ["seconds", 1.0, step]], []] for step in range(3)]
    first = [
        search,
        ["create", "id of jpipe", "run", {"jpipe_id": id}],
        ["batch", "r1", [], [["seed", "7"], ["model.width", "8"], ["model.kind", "decoder"]]],
        *rows[:2],
        ["end", "r1", "FAILED"],
    ]
    assert calls == first
    assert lines == ["mlflow: run r1 at sqlite:///here"]
    calls, _ = send("mlflow", MLFLOW, range(1, 3))
    assert calls[len(first) :] == [search, ["update", "r1", "RUNNING"], rows[2], ["end", "r1", "FINISHED"]]


@pytest.mark.parametrize("service", ["trackio", "mlflow"])
def test_a_failure_is_reported_and_the_run_continues(send, service):
    _, lines = send(service, "raise RuntimeError('no room')", range(3))
    assert lines == [f"{service}: no room; the run continues without it"]


@pytest.mark.parametrize("service", ["trackio", "mlflow"])
def test_a_missing_library_is_reported_before_a_run_starts(tiny, service, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(
        InputError, match=f"log: {service} is not installed; install it with pip install {service}, or remove {service} from log"
    ):
        logs.check([service])
    logs.check(changed(tiny).log)
