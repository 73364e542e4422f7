"""Data for training and validation. A batch has an index, and its rows are read when they are needed.

CONTRIBUTING.md explains which work Grain, pyarrow and tokenizers do, and why this package does the rest.
"""
