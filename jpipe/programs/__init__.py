"""Programs of a plan: instructions, their lowering, simulation and timeline. Nothing here imports JAX."""
