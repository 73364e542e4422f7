"""Read and write the `config.json` of a folder in Hugging Face's layout as keys of the section `model`, without JAX."""

from jpipe_train.config.huggingface.families import ARCHITECTURES, FAMILIES
from jpipe_train.config.huggingface.reading import (
    CONFIG,
    MOST_BYTES,
    Description,
    fill_section,
    is_folder,
    load_json,
    parse,
    read,
    whole_section,
)
from jpipe_train.config.huggingface.writing import to_json_keys

__all__ = [
    "ARCHITECTURES",
    "CONFIG",
    "FAMILIES",
    "MOST_BYTES",
    "Description",
    "fill_section",
    "is_folder",
    "load_json",
    "parse",
    "read",
    "to_json_keys",
    "whole_section",
]
