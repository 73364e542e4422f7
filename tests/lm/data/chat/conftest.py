"""A tokenizer with the special tokens of all styles."""

import json
from pathlib import Path

import pytest

from jpipe_lm.data import prepare
from tests.lm.data.chat.templates import CONVERSATIONS, SPECIAL, STYLES, template
from tests.lm.data.conftest import quiet


@pytest.fixture(scope="session")
def chat_folders(tmp_path_factory) -> dict[str, Path]:
    """Return a folder for each style, with a tokenizer and the template without marks."""
    place = tmp_path_factory.mktemp("chat")
    (place / "text.txt").write_text(
        "\n".join(message.get("content", "") for messages, *_ in CONVERSATIONS.values() for message in messages)
    )
    size = 256 + 1 + len(SPECIAL) + 20
    folders = {}
    for style, (_, begin, end) in STYLES.items():
        folders[style] = place / style
        folders[style].mkdir()
        file = folders[style] / "tokenizer.json"
        prepare.make_tokenizer(prepare.Files([str(place / "text.txt")]), size, str(file), quiet(), "decoder", SPECIAL)
        settings = {
            "bos_token": begin,
            "eos_token": {"__type": "AddedToken", "content": end},
            "chat_template": template(style, marked=False),
        }
        (folders[style] / "tokenizer_config.json").write_text(json.dumps(settings))
    return folders
