"""Machines: topologies from YAML, or measured on this machine."""
