"""The config of a run: its keys, its YAML, and the user's code that it names."""
