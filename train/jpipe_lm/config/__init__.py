"""The sections of a config for language models."""
