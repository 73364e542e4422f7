"""The config of a run: its keys, its YAML form, and the user's functions that it names."""
