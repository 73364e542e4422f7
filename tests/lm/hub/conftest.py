"""A Hub of its own for each test, and an empty cache."""

import pytest

from jpipe_lm.hub import download
from tests.lm.hub.server import Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Start a server, and make huggingface_hub use it, in programs that the test starts, too."""
    from huggingface_hub import constants

    server, cache = Hub(), tmp_path / "cache"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for key, value in {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache), "HF_TOKEN_PATH": str(tmp_path / "no-token")}.items():
        monkeypatch.setenv(key, value)
    forget()
    yield server
    server.close()
    forget()


def forget() -> None:
    """Forget what this process has fetched, as a new process would."""
    download.fetch.cache_clear()
    download._fetched.clear()
