"""Plans: what to run, as plain JSON data. A plan is checked when it is built."""

from jpipe.plan._agreement import Agreement, OuterOptimizer
from jpipe.plan._axes import RULES, mesh_rules
from jpipe.plan._exclusions import EXCLUSIONS, Exclusion, excluded
from jpipe.plan._host_memory import HostMemory, Kept
from jpipe.plan._links import BLOCK, Kind, Links, Message
from jpipe.plan._plan import Plan as Plan
from jpipe.plan._stage import RECOMPUTE, Predicted, repeats_forward
from jpipe.plan._stage import Stage as Stage
from jpipe.plan._text import html_of_plan as html_of_plan
from jpipe.plan._text import read_json

__all__ = [
    "BLOCK",
    "EXCLUSIONS",
    "RECOMPUTE",
    "RULES",
    "Agreement",
    "Exclusion",
    "HostMemory",
    "Kept",
    "Kind",
    "Links",
    "Message",
    "OuterOptimizer",
    "Predicted",
    "excluded",
    "mesh_rules",
    "read_json",
    "repeats_forward",
]  # Plan and Stage are in jpipe itself
