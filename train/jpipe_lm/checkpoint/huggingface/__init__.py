"""Read and write folders in Hugging Face's layout."""

from jpipe_lm.checkpoint.huggingface.folder import is_meant, reject_adapters, reject_file
from jpipe_lm.checkpoint.huggingface.read_adapters import with_adapters
from jpipe_lm.checkpoint.huggingface.read_weights import source

__all__ = ["is_meant", "reject_adapters", "reject_file", "source", "with_adapters"]
