"""Searches for stages that each have their own number of replicas, as PipeDream has them."""
