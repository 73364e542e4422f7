from .cost.price import all_reduce_seconds, cut_seconds
from .cost.shape import is_planned, needs_vertical_sync, planned_schedules, updates_early
from .cost.simulated import Simulated, simulate_plan
from .machine.attached import Attached, attached_target
from .machine.compiling import Compiling, compiling_for
from .machine.device import Device
from .machine.differing import Differing
from .machine.host import Host
from .machine.local import host_memory, local_topology, usable_cores
from .machine.targets import Target, TargetUnavailable, find_target, known_targets, target_devices, target_refusal
from .machine.topology import Level, Topology
from .profile.analyze import analyze
from .profile.flops import count_products
from .profile.graph_txt import read_graph_txt
from .profile.measure import measure
from .profile.profile import AtSize, LayerProfile, Profile, SharedProfile, TensorProfile
from .profile.sharded import NO_MESH, Degrees, Meshes, links_of, mesh_refusal, mesh_seconds, possible_degrees
from .ranking.choose import Choice, Ranked, choose
from .ranking.compiled import Compiled, compile_stages
from .ranking.confirm import Attempt, Confirmation, confirm
from .ranking.draw import draw_choice
from .ranking.improve import improve
from .ranking.price_of_flush import PriceOfFlush, price_of_flush
from .ranking.saving.offload import find_offloads, offload_bases
from .ranking.variants import Variants, find_variants, variant_schedules
from .search.balance import balance
from .search.candidate import USUAL, Asked, Candidate
from .search.candidates import Updates, as_candidate, find_candidates, has_searchable_stages, on_meshes
from .search.parallel import search_parallel
from .search.pipedream.paper import search_paper
from .search.pipedream.partition import Partition, Placed, Problem, evaluate_partition, placed_seconds
from .search.pipedream.search import search_pipedream

__all__ = [
    "NO_MESH",
    "USUAL",
    "Asked",
    "AtSize",
    "Attached",
    "Attempt",
    "Candidate",
    "Choice",
    "Compiled",
    "Compiling",
    "Confirmation",
    "Degrees",
    "Device",
    "Differing",
    "Host",
    "LayerProfile",
    "Level",
    "Meshes",
    "Partition",
    "Placed",
    "PriceOfFlush",
    "Problem",
    "Profile",
    "Ranked",
    "SharedProfile",
    "Simulated",
    "Target",
    "TargetUnavailable",
    "TensorProfile",
    "Topology",
    "Updates",
    "Variants",
    "all_reduce_seconds",
    "analyze",
    "as_candidate",
    "attached_target",
    "balance",
    "choose",
    "compile_stages",
    "compiling_for",
    "confirm",
    "count_products",
    "cut_seconds",
    "draw_choice",
    "evaluate_partition",
    "find_candidates",
    "find_offloads",
    "find_target",
    "find_variants",
    "has_searchable_stages",
    "host_memory",
    "improve",
    "is_planned",
    "known_targets",
    "links_of",
    "local_topology",
    "measure",
    "mesh_refusal",
    "mesh_seconds",
    "needs_vertical_sync",
    "offload_bases",
    "on_meshes",
    "placed_seconds",
    "planned_schedules",
    "possible_degrees",
    "price_of_flush",
    "read_graph_txt",
    "search_paper",
    "search_parallel",
    "search_pipedream",
    "simulate_plan",
    "target_devices",
    "target_refusal",
    "updates_early",
    "usable_cores",
    "variant_schedules",
]
