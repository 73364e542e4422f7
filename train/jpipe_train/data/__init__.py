"""Data for training and validation: batches by index; rows are read when they are needed.

CONTRIBUTING.md says which part is left to Grain, pyarrow and tokenizers, and why the rest is here.
"""
