"""Convert the `config.json` of a folder in Hugging Face's layout to keys of the section `model` and back, without JAX."""

from jpipe_lm.config.huggingface.adapter_config import (
    ADAPTER_CONFIG,
    Adapters,
    fill_lora,
    has_adapters,
    is_or_ends,
    is_saved,
    module_parts,
    read_adapters,
)
from jpipe_lm.config.huggingface.families import ARCHITECTURES, FAMILIES
from jpipe_lm.config.huggingface.read_config import (
    CONFIG,
    MOST_BYTES,
    Description,
    fill_section,
    inside,
    is_folder,
    load_json,
    parse,
    read,
    whole_section,
)
from jpipe_lm.config.huggingface.write_config import to_json_keys

__all__ = [
    "ADAPTER_CONFIG",
    "ARCHITECTURES",
    "CONFIG",
    "FAMILIES",
    "MOST_BYTES",
    "Adapters",
    "Description",
    "fill_lora",
    "fill_section",
    "has_adapters",
    "inside",
    "is_folder",
    "is_or_ends",
    "is_saved",
    "load_json",
    "module_parts",
    "parse",
    "read",
    "read_adapters",
    "to_json_keys",
    "whole_section",
]
