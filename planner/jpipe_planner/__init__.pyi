from .machine.device import Device
from .machine.local import local_topology
from .machine.topology import Level, Topology
from .profile.analyze import analyze
from .profile.graph_txt import read_graph_txt
from .profile.measure import measure
from .profile.profile import LayerProfile, Profile
from .ranking.choose import Choice, Ranked
from .ranking.draw import draw_choice
from .ranking.find import Plans, find_plans
from .search.candidate import Candidate

__all__ = [
    "Candidate",
    "Choice",
    "Device",
    "LayerProfile",
    "Level",
    "Plans",
    "Profile",
    "Ranked",
    "Topology",
    "analyze",
    "draw_choice",
    "find_plans",
    "local_topology",
    "measure",
    "read_graph_txt",
]
