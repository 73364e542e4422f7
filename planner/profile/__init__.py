"""What a model costs, layer by layer: measured, computed, or read from PipeDream's files."""
