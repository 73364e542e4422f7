"""The keys of a config that describe a language model."""
