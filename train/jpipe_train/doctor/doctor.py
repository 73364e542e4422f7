"""`jpipe doctor`: gather the facts of all processes, judge them, and print what to change."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jpipe
from jpipe import InputError
from jpipe_planner import local_topology
from jpipe_train.assemble.build import start_devices
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.doctor import exchange, local, show
from jpipe_train.doctor.findings import Finding
from jpipe_train.doctor.judge import judge
from jpipe_train.doctor.local import Facts
from jpipe_train.launch.distributed import Membership
from jpipe_train.launch.together import Together, joined

_ARRIVE = 600.0  # seconds: a process may look at its host that much longer than another one


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
            raise InputError("doctor --set: expected a config to replace keys of, found none; add --config CONFIG")
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
    facts["clock"] = exchange.compare_clocks(processes)._asdict()
    folder = facts["folder"].get("existing")
    facts["sees folder"] = exchange.see_same_folder(processes, None if folder is None else Path(folder))
    everyone = [json.loads(text) for text in exchange.collect(processes, "facts", json.dumps(facts))]
    if together.is_first:
        processes.broadcast("whether links are measured", [float(_are_alike(everyone))])
    if processes.receive("whether links are measured", 0) == (1.0,):
        links = _measured_links(together)
        if together.is_first:
            everyone[0]["links"] = links
    if together.is_first:
        processes.broadcast("exit code", [float(_finish(request, everyone, problems))])
    return int(processes.receive("exit code", 0)[0])


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
    print(show.as_json(findings, everyone) if request.as_json else "\n".join(show.table(findings)), flush=True)
    return int(show.has_problem(findings))
