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
