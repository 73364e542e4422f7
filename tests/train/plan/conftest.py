"""The config of a small run, for the commands that plan and simulate."""

import pytest
import yaml


@pytest.fixture
def config(tmp_path, tiny) -> str:
    """Write the config of a small run and return its path."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny))
    return str(path)
