"""The public names of `import jpipe_planner`, each imported at its first use."""

import subprocess
import sys

import jpipe_planner


def test_every_public_name_can_be_imported():
    assert [name for name in jpipe_planner.__all__ if not hasattr(jpipe_planner, name)] == []
    assert set(jpipe_planner.__all__) <= set(dir(jpipe_planner))


def test_a_topology_is_read_without_jax():
    program = "import sys, jpipe_planner; jpipe_planner.Topology.flat(2, 1e9); print(*({'jax', 'jpipe_planner.search'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "\n"


SEARCH = """
import sys
from jpipe_planner import Profile, Topology, find_plans

at = [{"forward": 0.01, "backward": 0.02, "outputs": 1000, "residuals": {"none": 1000}}]
layers = [{"id": f"layer {n}", "weights": 4000, "optimizer": 8000, "at": at} for n in range(4)]
profile = Profile(source="measured", sizes=[8], inputs=[64], labels=[64], layers=layers)
profile = Profile.from_json(profile.to_json())
choice = find_plans(profile, Topology.flat(2, 1e9, memory=1e9), batch=32).choice
print(choice.plan(choice.ranked[0]).depth > 0, "jax" in sys.modules)
"""


def test_plans_are_found_from_a_saved_profile_without_jax():
    result = subprocess.run([sys.executable, "-c", SEARCH], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout == "True False\n"
