"""`jpipe doctor`: gather the facts of all processes, judge them, and print what to change."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jpipe
from jpipe import InputError
from jpipe.files import create
from jpipe_planner import local_topology
from jpipe_train.assemble.build import start_devices
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.doctor import local
from jpipe_train.doctor.findings import Finding, table
from jpipe_train.doctor.judge import judge
from jpipe_train.doctor.local import Facts
from jpipe_train.doctor.system import temporary_name
from jpipe_train.launch.distributed import Membership
from jpipe_train.launch.together import Together, joined

FORMAT = "jpipe-doctor/1"
_ARRIVE = 600.0  # seconds: a process may look at its host that much longer than another one
_APPEARS = 15.0  # seconds after which a file of another host has to be seen; network file systems remember for some that there was none
_LOOK = 0.2  # seconds between two looks


class Request(NamedTuple):
    """What to look at.

    Attributes:
        config: the file of a run's config; without one, what runs by default is looked at.
        overrides: `key=value` for the config.
        as_json: whether to print JSON in place of the table.
    """

    config: str | None = None
    overrides: tuple[str, ...] = ()
    as_json: bool = False


def main(
    request: Request,
    member: Membership | None,
    connect: Callable[[], int],
    connect_limit: float = 300.0,
    wait_limit: float = 45.0,
    gather: Callable[[Config | None, Membership | None], Facts] = local.gather,
) -> int:
    """Look at this host and, with several processes, at all hosts and the links between them; process 0 prints.

    Args:
        request: what to look at.
        member: the place of this process; None for a single one.
        connect: connects the processes and returns their number.
        connect_limit: seconds to wait for the other processes at the start.
        wait_limit: seconds without progress in any process after which they give up.
        gather: gathers the facts of this process.

    Returns:
        The exit code: 1 if there is a problem, else 0; the same in all processes, unless they lose each other.

    Raises:
        InputError: there are overrides without a config; in other processes than the first also: the processes cannot connect.
        jpipe.PeerLost: in other processes than the first: another process died, hung or stopped.
    """
    config, problems = _config(request)
    facts = gather(config, member)
    is_first = member is None or member.process_id == 0
    try:
        with joined(connect(), connect_limit, wait_limit) as together:
            return _look(request, together, facts, problems)
    except (InputError, jpipe.PeerLost) as error:
        if not is_first:
            raise
        advice = "see docs/how-to/troubleshooting/processes.md, and docs/how-to/security.md for ports and secrets"
        return _finish(request, [facts], [*problems, Finding("problem", "processes", str(error), advice)])


def _config(request: Request) -> tuple[Config | None, list[Finding]]:
    """Return the config, and a finding if it cannot be read. Code that it names is not imported.

    Raises:
        InputError: there are overrides and no config.
    """
    if request.config is None:
        if request.overrides:
            raise InputError(where="doctor --set", expected="a config to replace keys of", found="none", change="add --config CONFIG")
        return None, []
    try:
        return config_file.load(request.config, request.overrides, allow_code=True), []
    except InputError as error:
        return None, [Finding("problem", "config", str(error), "correct it; the rows below are about a run with the defaults")]


def _look(request: Request, together: Together, facts: Facts, problems: list[Finding]) -> int:
    """Compare the processes, print in process 0, and return the exit code in all."""
    processes = together.processes
    if processes is None:
        return _finish(request, [facts], problems)
    processes.barrier("the facts of each host", _ARRIVE)
    facts["process"]["connected"] = True
    folder = facts["folder"].get("existing")
    facts["sees folder"] = see_same_folder(processes, None if folder is None else Path(folder))
    everyone = [json.loads(text) for text in processes.gather("facts", json.dumps(facts).encode())]
    if _are_alike(everyone):
        everyone[0]["links"] = _measured_links(together)
    if together.is_first:
        processes.broadcast("exit code", str(_finish(request, everyone, problems)).encode())
    return int(processes.receive("exit code", 0))


def see_same_folder(processes: jpipe.processes.Processes, folder: Path | None, limit: float = _APPEARS) -> bool | None:
    """Return whether this process sees in a folder a file that process 0 writes there; all call it.

    Args:
        processes: the processes of the job.
        folder: an existing folder, which has the same path in all processes; None where this process has none.
        limit: seconds that the file may take to appear.

    Returns:
        Whether it is there; None if process 0 cannot write.

    Raises:
        jpipe.PeerLost: the job is lost.
    """
    with contextlib.ExitStack() as files:
        if processes.index == 0:
            name = temporary_name() if folder is not None else ""
            try:
                if folder is not None:
                    with create(folder / name) as file:
                        file.write(name.encode())
                    files.callback((folder / name).unlink, missing_ok=True)
            except OSError:
                name = ""
            processes.broadcast("name of the shared file", name.encode())
        name = processes.receive("name of the shared file", 0).decode()
        seen = None if not name else folder is not None and _appears(folder / name, limit)
        processes.barrier("the shared file")
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


def _are_alike(everyone: list[Facts]) -> bool:
    """Return whether JAX can start the devices of all processes together, and move arrays between them."""
    kinds = [(facts["devices"].get("platform"), tuple(facts["devices"].get("kinds", ()))) for facts in everyone]
    return len(set(kinds)) == 1 and all("error" not in facts["devices"] for facts in everyone)


def _measured_links(together: Together) -> dict[str, float | str]:
    """Return latency (seconds) and bandwidth (bytes per second) between neighbouring processes, or an `error`; all call it."""
    assert together.processes is not None
    try:
        with together.processes.waiting("the links between the processes", limit=_ARRIVE), _prints_on_standard_error():
            start_devices()
            level = local_topology().levels[0]
    except (InputError, RuntimeError, jpipe.PeerLost) as error:
        if not together.is_first:
            raise
        return {"error": " ".join(str(error).split())}
    return {"latency": level.latency, "bandwidth": level.bandwidth}


@contextlib.contextmanager
def _prints_on_standard_error() -> Iterator[None]:
    """Keep what libraries print out of the table and the JSON: gloo prints a line for each connection, and cannot be told not to."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def _finish(request: Request, everyone: list[Facts], problems: list[Finding]) -> int:
    findings = judge(everyone, problems)
    if request.as_json:
        rows = [{name: getattr(finding, name) for name in ("level", "what", "found", "advice")} for finding in findings]
        print(json.dumps({"format": FORMAT, "findings": rows, "processes": everyone}, indent=2), flush=True)
    else:
        print("\n".join(table(findings)), flush=True)
    return int(any(finding.level == "problem" for finding in findings))
