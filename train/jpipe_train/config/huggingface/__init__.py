"""The `config.json` of a folder in Hugging Face's layout, read as and written from the section `model`: data only, no JAX."""

from jpipe_train.config.huggingface.reading import CONFIG, MOST_BYTES, Found, described, filled, is_folder, load_json, read
from jpipe_train.config.huggingface.schemas import ARCHITECTURES
from jpipe_train.config.huggingface.writing import written

__all__ = ["ARCHITECTURES", "CONFIG", "MOST_BYTES", "Found", "described", "filled", "is_folder", "load_json", "read", "written"]
