"""The registry of schedules. A new schedule of jpipe is one file in this folder and one line here; your own code calls `register`."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from jpipe.errors import InputError, nearest, short
from jpipe.schedules._options import NO_OPTIONS, PlanOptions, ScheduleOptions
from jpipe.schedules._schedule import Action, PlainShape, Ranks, Schedule, Shape, arranged, one_forward_one_backward, pipeline_in_flight
from jpipe.schedules.dualpipe_v import DUALPIPE_V
from jpipe.schedules.gpipe import GPIPE
from jpipe.schedules.interleaved_1f1b import INTERLEAVED_1F1B
from jpipe.schedules.looped_bfs import LOOPED_BFS
from jpipe.schedules.naive import NAIVE
from jpipe.schedules.pipedream import PIPEDREAM, pipedream_versions
from jpipe.schedules.pipedream_2bw import PIPEDREAM_2BW
from jpipe.schedules.pipedream_flush import PIPEDREAM_FLUSH
from jpipe.schedules.zero_bubble._greedy import StageTimes
from jpipe.schedules.zero_bubble._order_text import as_text
from jpipe.schedules.zero_bubble.auto_zero_bubble import AUTO_ZERO_BUBBLE, greedy_order
from jpipe.schedules.zero_bubble.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from jpipe.schedules.zero_bubble.zb_h1 import ZB_H1
from jpipe.schedules.zero_bubble.zb_h2 import ZB_H2
from jpipe.schedules.zero_bubble.zb_v import ZB_V

_ONE_STAGE = (NAIVE, GPIPE, PIPEDREAM_FLUSH, PIPEDREAM, PIPEDREAM_2BW)
_CHUNKS = (INTERLEAVED_1F1B, LOOPED_BFS, DUALPIPE_V)
_ZERO_BUBBLE = (ZB_H1, ZB_H2, ZB_V, INTERLEAVED_ZERO_BUBBLE, AUTO_ZERO_BUBBLE)
_BY_NAME = {schedule.name: schedule for schedule in (*_ONE_STAGE, *_CHUNKS, *_ZERO_BUBBLE)}

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(_BY_NAME)
"""The schedules by the names that plans use."""

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "fill_drain": "gpipe",
        "afab": "gpipe",
        "1f1b": "pipedream_flush",
        "interleaved": "interleaved_1f1b",
        "vpp": "interleaved_1f1b",
        "bfs": "looped_bfs",
        "zbv_zero_bubble": "zb_v",
        "2bw": "pipedream_2bw",
    }
)
"""Further names by which `name_of` finds schedules: those that papers and other libraries use."""


def name_of(name: str) -> str:
    """Return the name in `SCHEDULES` of a schedule that may be written in another way.

    Args:
        name: a name of `SCHEDULES` or `OTHER_NAMES`. Case, spaces, "-" and "_" do not matter.

    Raises:
        InputError: no schedule has this name.

    Example:
        >>> [name_of(name) for name in ("1F1B", "ZBH1", "Interleaved1F1B", "gpipe")]
        ['pipedream_flush', 'zb_h1', 'interleaved_1f1b', 'gpipe']
    """
    if not isinstance(name, str):
        raise InputError(where="schedule", expected="the name of a schedule", found=short(name))
    names = {**dict(zip(_BY_NAME, _BY_NAME, strict=True)), **OTHER_NAMES}
    found = name if name in _BY_NAME else {_plain(known): schedule for known, schedule in names.items()}.get(_plain(name))
    if found is None:
        raise InputError(f"unknown schedule {name!r}; {nearest(name, names)}")
    return found


def _plain(name: str) -> str:
    return re.sub(r"^schedule|[\s_-]", "", name.lower())  # torch calls its classes Schedule1F1B and so on


def register(schedule: Schedule) -> Schedule:
    """Add your own schedule to `SCHEDULES`, where plans, pipelines and planners look up schedules by name.

    In a run of several processes each process must register the schedule before it makes or reads a plan.

    Args:
        schedule: the schedule. Registering the same object again changes nothing.

    Returns:
        The schedule.

    Raises:
        InputError: the schedule's name is not an identifier, or belongs to another schedule.

    Example:
        >>> SCHEDULES["gpipe"] is register(SCHEDULES["gpipe"])
        True
    """
    name = schedule.name
    if not name.isidentifier():
        raise InputError(f"schedule: expected a name of letters, digits and underscores, found {short(name)}; choose another name")
    if _BY_NAME.setdefault(name, schedule) is not schedule:
        raise InputError(f"schedule: the name '{name}' belongs to another schedule; choose another name")
    return schedule


def written_order(plan: Shape) -> tuple[str, ...]:
    """Return the order of a plan for a batch that begins and ends with an empty pipeline, in the form of `PlanOptions.order`.

    You can start from a schedule's order to write your own. With replicas, it has the microbatches of one replica, counted from 0.

    Returns:
        The text of each pipeline rank's order.
    """
    texts = []
    for p, stages in enumerate(plan.pipeline_ranks):
        replicas = plan.replicas[stages[0]]
        order = SCHEDULES[plan.schedule].computations(plan, p, 0, 0, 1)
        texts.append(as_text(entry._replace(microbatch=entry.microbatch // replicas) for entry in order))
    return tuple(texts)


__all__ = [
    "NO_OPTIONS",
    "OTHER_NAMES",
    "SCHEDULES",
    "Action",
    "PlainShape",
    "PlanOptions",
    "Ranks",
    "Schedule",
    "ScheduleOptions",
    "Shape",
    "StageTimes",
    "arranged",
    "greedy_order",
    "name_of",
    "one_forward_one_backward",
    "pipedream_versions",
    "pipeline_in_flight",
    "register",
    "written_order",
]
