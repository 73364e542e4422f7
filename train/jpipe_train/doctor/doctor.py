"""`jpipe doctor`: gather the facts of all processes, judge them, and print what to change."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jpipe
from jpipe import InputError
from jpipe.files import create
from jpipe_planner import local_topology
from jpipe_train.assemble.build import start_devices
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.doctor import facts
from jpipe_train.doctor.checks import Finding, judge, table
from jpipe_train.doctor.doctor_request import Request
from jpipe_train.doctor.facts import Facts, temporary_name
from jpipe_train.launch.distributed import Membership
from jpipe_train.launch.team import Team, joined

FORMAT = "jpipe-doctor/1"
_ARRIVE = 600.0  # seconds for measuring the links
_APPEARS = 15.0  # seconds until a file of another host must appear; network file systems cache its absence for some seconds
_LOOK = 0.2  # seconds between two checks for the file


def main(
    request: Request,
    member: Membership | None,
    connect: Callable[[], int],
    connect_limit: float = 300.0,
    wait_limit: float = 45.0,
    gather: Callable[[Config | None, Membership | None], Facts] = facts.gather,
) -> int:
    """Check this host and, with several processes, all hosts and the links between them; process 0 prints.

    Return the exit code: 1 if there is a problem, else 0; the same in all processes, unless they lose each other.

    Raises:
        InputError: there are overrides without a config; or, except in process 0, the processes cannot connect.
        jpipe.PeerLost: except in process 0: another process died, hung or stopped.
    """
    if request.overrides and request.config is None:
        raise InputError(where="doctor --set", expected="a config to replace keys in", found="none", change="add --config CONFIG")
    config, problems = None, []
    try:
        if request.config is not None:
            config = config_file.load(request.config, request.overrides, allow_code=True)  # without importing the code that it names
    except InputError as error:
        problems.append(Finding("problem", "config", str(error), "correct it; the rows below are for a run with the defaults"))
    own = gather(config, member)
    try:
        with joined(connect(), connect_limit, wait_limit) as team:
            everyone = [own] if team.processes is None else _compared(team, team.processes, own)
            findings = judge(everyone, problems)
            code = int(team.from_first("the exit code", lambda: str(_code_of(findings))))
            if team.is_first:
                _print(request, everyone, findings)
            return code
    except (InputError, jpipe.PeerLost) as error:
        if member is not None and member.process_id:
            raise
        advice = "see docs/how-to/troubleshooting/processes.md, and docs/how-to/security.md for ports and secrets"
        findings = judge([own], [*problems, Finding("problem", "processes", str(error), advice)])
        _print(request, [own], findings)
        return _code_of(findings)


def _compared(team: Team, processes: jpipe.processes.Processes, own: Facts) -> list[Facts]:
    """Return the facts of all processes, and add the facts that they can only find together."""
    folder = own["folder"].get("existing")
    own["sees folder"] = see_same_folder(team, None if folder is None else Path(folder))
    everyone: list[Facts] = [json.loads(text) for text in processes.gather("facts", json.dumps(own).encode())]
    if are_alike(everyone):
        try:
            with processes.waiting("the links between the processes", limit=_ARRIVE), _prints_on_standard_error():
                start_devices()
                level = local_topology().levels[0]
            everyone[0]["links"] = {"latency": level.latency, "bandwidth": level.bandwidth}  # in seconds, and bytes per second
        except (InputError, RuntimeError, jpipe.PeerLost) as error:
            if not team.is_first:
                raise
            everyone[0]["links"] = {"error": " ".join(str(error).split())}
    return everyone


def see_same_folder(team: Team, folder: Path | None, limit: float = _APPEARS) -> bool | None:
    """Return whether this process sees, within `limit` seconds, a file that process 0 writes into a folder; all call this.

    The folder has the same path in all processes, or is None if a process has no such folder. Return None if process 0 cannot write.
    """
    with contextlib.ExitStack() as files:

        def write() -> str:
            name = temporary_name()
            try:
                if folder is None:
                    return ""
                with create(folder / name) as file:
                    file.write(name.encode())
            except OSError:
                return ""
            files.callback((folder / name).unlink, missing_ok=True)
            return name

        name = team.from_first("the name of the shared file", write)
        seen = None if not name else folder is not None and _appears(folder / name, limit)
        team.meet("the shared file")
    return seen


def _appears(file: Path, limit: float) -> bool:
    end = time.monotonic() + limit
    while True:
        with contextlib.suppress(OSError):
            if file.read_bytes() == file.name.encode():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)


def are_alike(everyone: list[Facts]) -> bool:
    """Return whether JAX can start the devices of all processes together, and move arrays between them."""
    kinds = {str((facts["devices"].get("platform"), facts["devices"].get("kinds"))) for facts in everyone}
    return len(kinds) == 1 and all("error" not in facts["devices"] for facts in everyone)


@contextlib.contextmanager
def _prints_on_standard_error() -> Iterator[None]:
    """Send the prints of libraries to standard error, away from the table and the JSON. Gloo always prints a line for each connection."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def _code_of(findings: list[Finding]) -> int:
    return int(any(finding.level == "problem" for finding in findings))


def _print(request: Request, everyone: list[Facts], findings: list[Finding]) -> None:
    if request.as_json:
        rows = [{name: getattr(finding, name) for name in ("level", "what", "found", "advice")} for finding in findings]
        print(json.dumps({"format": FORMAT, "findings": rows, "processes": everyone}, indent=2), flush=True)
    else:
        print("\n".join(table(findings)), flush=True)
