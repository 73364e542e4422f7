"""Parts of the section `model` of a config."""
