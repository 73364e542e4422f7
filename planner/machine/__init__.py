"""The machine: a topology from YAML, or measured on the devices at hand."""
