"""The registry of schedules. A new schedule is one file in this folder and one line here."""

from collections.abc import Mapping
from types import MappingProxyType

from jpipe.schedules._schedule import Compute, Op, Ranks, Schedule, Shape, arranged, one_forward_one_backward, pipeline_in_flight
from jpipe.schedules.gpipe import GPIPE
from jpipe.schedules.interleaved_1f1b import INTERLEAVED_1F1B
from jpipe.schedules.naive import NAIVE
from jpipe.schedules.pipedream import PIPEDREAM
from jpipe.schedules.pipedream_2bw import PIPEDREAM_2BW
from jpipe.schedules.pipedream_flush import PIPEDREAM_FLUSH
from jpipe.schedules.zb_h1 import ZB_H1

_BY_NAME = {schedule.name: schedule for schedule in (NAIVE, GPIPE, PIPEDREAM_FLUSH, PIPEDREAM, PIPEDREAM_2BW, INTERLEAVED_1F1B, ZB_H1)}

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(_BY_NAME)
"""The schedules by the names that plans use."""

__all__ = ["SCHEDULES", "Compute", "Op", "Ranks", "Schedule", "Shape", "arranged", "one_forward_one_backward", "pipeline_in_flight"]
