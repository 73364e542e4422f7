"""Models and data sets of the Hugging Face Hub by name, such as `hf:owner/name`, for the scheme `hf` of `jpipe_train.registry`."""

from jpipe_lm.hub.download import fetch, fetch_weights, pin
from jpipe_lm.hub.upload import check, push

__all__ = ["check", "fetch", "fetch_weights", "pin", "push"]
