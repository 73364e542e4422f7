"""Folders in Hugging Face's layout: read for a run to begin with, and written from a run."""

from jpipe_train.checkpoint.huggingface.folder import is_meant, refuse_file
from jpipe_train.checkpoint.huggingface.reading import source

__all__ = ["is_meant", "refuse_file", "source"]
