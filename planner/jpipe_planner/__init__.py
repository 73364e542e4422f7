"""The planner: finds the fastest plan that fits, from a model's profile and a topology, and explains the choice.

topology, profile → search (PipeDream's stages, parallel pipelines) → candidates → simulation, compiled memory → the plan.
"""
