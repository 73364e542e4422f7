"""Parts of the section `model` of a config: presets, and keys that hold several values."""
