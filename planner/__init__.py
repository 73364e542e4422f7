"""The planner: from a model's profile and a topology to the plan that trains fastest and fits, and why.

topology, profile → search (PipeDream's stages, parallel pipelines) → candidates → simulation, compiled memory → the plan.
"""
