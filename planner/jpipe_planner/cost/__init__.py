"""Costs of plans: closed forms, memory, links, simulation, and bounds."""
