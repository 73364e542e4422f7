"""Parts of the section `model` of a config: presets, and keys that have several values."""
