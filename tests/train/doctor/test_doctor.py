"""`jpipe doctor`: the exit code says whether there is a problem, in one process and in several."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jpipe import InputError
from jpipe.processes import Address
from jpipe_train import cli
from jpipe_train.doctor import doctor, facts
from jpipe_train.doctor.doctor_request import Request
from jpipe_train.launch.distributed import Membership
from tests.train.doctor.recorded import recorded

ROOT = Path(__file__).parents[3]
LIMIT = 300  # seconds, for what takes twenty
JPIPE = (sys.executable, "-P", "-m", "jpipe_train.cli")


def alone() -> int:
    return 1


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"memory": {"available": 0}}, 1), ({"folder": {"bytes_per_second": 1e6}}, 0)])
def test_the_exit_code_is_1_with_a_problem(changes, code, capsys):
    assert doctor.main(Request(), None, alone, gather=lambda config, member: recorded(**changes)) == code
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == f"{code} problem{'s' * (not code)}, {int('folder' in changes)} note{'s' * ('folder' not in changes)}"
    assert rows[0].startswith("ok ")


def test_json_has_findings_and_facts(capsys):
    assert doctor.main(Request(as_json=True), None, alone, gather=lambda config, member: recorded()) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["format"] == "jpipe-doctor/1"
    assert printed["processes"] == [recorded()]
    assert set(printed["findings"][0]) == {"level", "what", "found", "advice"}


def test_a_config_that_cannot_be_read_is_one_row(tmp_path, capsys):
    seen = []
    config = tmp_path / "wrong.yaml"
    config.write_text("trian: {}\n")
    assert doctor.main(Request(str(config)), None, alone, gather=lambda config, member: seen.append(config) or recorded()) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"problem  config         {config}: unknown key 'trian'; did you mean 'train'?")
    assert seen == [None]


def test_the_config_of_the_run_is_looked_at(tiny, tmp_path, capsys):
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny))
    seen = []
    request = Request(str(config), (f"run.dir={tmp_path / 'there'}",))
    doctor.main(request, None, alone, gather=lambda config, member: seen.append(config.run.dir) or recorded())
    assert seen == [str(tmp_path / "there")]


@pytest.mark.parametrize("process_id", [0, 1])
def test_processes_that_do_not_connect_are_one_row_of_process_0(process_id, capsys):
    def late() -> int:
        raise InputError("process 1 of 2 did not connect")

    member = Membership(Address("10.0.0.1", 80), 2, process_id)
    own = recorded(process={"count": 2, "index": process_id, "coordinator": "10.0.0.1"})
    if process_id:
        with pytest.raises(InputError):
            doctor.main(Request(), member, late, gather=lambda config, member: own)
        return
    assert doctor.main(Request(), member, late, gather=lambda config, member: own) == 1
    out = capsys.readouterr().out
    assert out.startswith("problem  processes      process 1 of 2 did not connect\n")
    assert "\nok       memory " in out, "the rest is known, too"


def test_wrong_options_are_bad_input(capsys):
    assert cli.main(["doctor", "--num-processes", "2", "--process-id", "1"]) == 2
    assert capsys.readouterr().err.startswith("jpipe: --coordinator: missing;")


def test_overrides_without_a_config_are_bad_input(capsys):
    assert cli.main(["doctor", "--set", "run.dir=x"]) == 2
    assert capsys.readouterr().err == "jpipe: doctor --set: expected a config to replace keys in, found none; add --config CONFIG\n"


def test_devices_of_different_kinds_are_not_started_together():
    one, other, broken = recorded(), recorded(devices={"kinds": ["A100"]}), recorded(devices={"error": "none"})
    assert doctor.are_alike([one, one])
    assert not doctor.are_alike([one, other])
    assert not doctor.are_alike([one, broken])
    assert not doctor.are_alike([broken, broken])


@pytest.mark.slow  # each process starts JAX twice
@pytest.mark.parametrize("launcher", ["jpipe launch", "srun"])
def test_two_processes_look_at_themselves_and_at_the_link_between_them(launcher, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_COORDINATOR"))}
    environment |= {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'train'}:{ROOT / 'planner'}",
        "JPIPE_SECRET": "between these two alone",
        "JAX_ENABLE_X64": "0",
    }
    words = ("doctor", "--json")
    if launcher == "jpipe launch":
        commands = [([*JPIPE, "launch", "-n", "2", "--", *words], {})]
    else:
        commands = [([*JPIPE, *words], variables) for variables in slurm_variables()]
    started = [
        subprocess.Popen(command, cwd=tmp_path, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, variables in commands
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [bool(out) for out, _ in outputs] == [True, False][: len(started)], outputs
    printed = json.loads(outputs[0][0])
    code = int(any(finding["level"] == "problem" for finding in printed["findings"]))  # such as a full disk
    assert [process.returncode for process in started] == [code] * len(started), outputs
    rows = {finding["what"]: finding for finding in printed["findings"]}
    assert rows["processes"]["found"] == f"2 connected: {socket.gethostname()} has processes 0-1"
    assert {"links", "devices"} <= rows.keys()
    first, second = printed["processes"]
    assert (first["sees folder"], second["sees folder"]) == (True, True)
    assert first["links"]["latency"] > 0
    assert [*tmp_path.iterdir()] == []


def slurm_variables():
    """Return what srun gives two tasks of one node; a job's number decides the port of the coordinator."""
    for port in range(61440, 65536):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        break
    of_job = {"SLURM_JOB_ID": str(port - 61440), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    return [of_job | {"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)} for k in range(2)]


def test_facts_can_be_sent(monkeypatch, tmp_path):
    """All facts are plain data, those of this machine, too."""
    monkeypatch.chdir(tmp_path)
    found = facts.gather(None, Membership(Address("10.0.0.1", 80), 2, 1, [1]), lambda: recorded()["devices"])
    assert json.loads(json.dumps(found)) == found
    assert found["process"]["index"] == 1
    assert set(recorded()) == set(found)
