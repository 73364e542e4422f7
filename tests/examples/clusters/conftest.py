"""A config whose run takes seconds."""

import pytest
import yaml

from tests.train.conftest import SENTENCE, tiny_of


@pytest.fixture
def tiny_config(tmp_path) -> str:
    """Write the tiny config of the training tests, and give its path."""
    text = tmp_path / "text.txt"
    text.write_bytes(SENTENCE * 100)
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_of(text, tmp_path / "run")))
    return str(path)
