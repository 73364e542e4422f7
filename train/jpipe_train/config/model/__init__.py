"""The parts of the section `model` of a config."""
