"""The machine: a topology from YAML, or measured on this machine."""
