"""Targets that were built in before are reported with their new names."""

import importlib

import pytest
from pydantic import ValidationError

from jpipe_train.config.config import Config
from jpipe_train.config.section import MOVED


@pytest.mark.parametrize("name", MOVED)
def test_each_moved_model_has_a_new_name(name):
    module, _, function = MOVED[name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    with pytest.raises(ValidationError, match=f"'{name}' is now an example; write {MOVED[name]}, .* add --allow-code"):
        Config.model_validate({"model": {"target": name}})
