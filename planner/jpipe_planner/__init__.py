"""jpipe_planner: find the fastest pipeline plan that fits, from a model's profile and a topology, and explain the choice.

topology, profile → search (equal pipelines, PipeDream's stages) → candidates → simulation, compiled memory → the plan.

Every name is imported when it is first used, so reading topologies and profiles and searching need no JAX. `__init__.pyi` lists the names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
