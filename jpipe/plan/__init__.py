"""Plans: what to run, as plain JSON data. A plan is checked when it is built."""

from jpipe.capabilities import registry
from jpipe.capabilities.protocol import Exclusion
from jpipe.capabilities.registry import *  # noqa: F403  # the options of capabilities
from jpipe.capabilities.registry import CapabilityOptions
from jpipe.plan._axes import RULES, mesh_rules
from jpipe.plan._exclusions import EXCLUSIONS, excluded
from jpipe.plan._plan import Plan as Plan
from jpipe.plan._stage import RECOMPUTE, Predicted, repeats_forward
from jpipe.plan._stage import Stage as Stage
from jpipe.plan._text import read_json

__all__ = [
    "EXCLUSIONS",
    "RECOMPUTE",
    "RULES",
    "CapabilityOptions",
    "Exclusion",
    "Predicted",
    "excluded",
    "mesh_rules",
    "read_json",
    "repeats_forward",
]  # Plan and Stage are in jpipe itself
__all__ += registry.__all__
