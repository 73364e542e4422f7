"""Conversations in rows of files. A row is an object with `messages` and optionally `tools`."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jpipe.errors import short
from jpipe_train.data.files.wrong_lines import WrongLine

ROLES = "system", "user", "assistant", "tool"
MOST_BYTES = 2**24  # the largest size of a conversation as JSON


class Conversation(NamedTuple):
    """A conversation."""

    messages: list[dict[str, Any]]  # the messages. Each has a role, and usually content, which is a text or a list of text parts.
    tools: list[Any] | None  # descriptions of the tools that the assistant may call; None if there are none

    @property
    def key(self) -> bytes:
        """Bytes that are equal for equal conversations, whatever the order of their keys."""
        return json.dumps(self, sort_keys=True).encode()

    @property
    def contents(self) -> list[str]:
        """The texts of the messages."""
        found = [message.get("content") or "" for message in self.messages]
        return [content if isinstance(content, str) else "".join(part["text"] for part in content) for content in found]


def conversation(values: Mapping[str, Any]) -> Conversation:
    """Return the conversation in a row. Keys of a message with null values are left out, as in transformers.

    Raise WrongLine if the row is not a conversation.
    """
    messages, tools = values.get("messages"), values.get("tools")
    if "messages" not in values:
        raise WrongLine(f"expected the key 'messages', found {short(list(values)[:10])}")
    if not isinstance(messages, list) or not messages:
        raise WrongLine(f"expected a list of messages in 'messages', found {'an empty one' if messages == [] else type(messages).__name__}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise WrongLine(f"expected a list of objects in 'tools', found {short(tools)}")
    found = Conversation([_message(message, i) for i, message in enumerate(messages, 1)], tools)
    if len(found.key) > MOST_BYTES:
        raise WrongLine(f"expected a conversation of at most {MOST_BYTES:,} bytes, found more")
    return found


def _message(message: Any, number: int) -> dict[str, Any]:
    """Return a message without null values. Raise WrongLine if the value is not a message."""
    where = f"message {number}"
    if not isinstance(message, dict):
        raise WrongLine(f'{where}: expected an object such as {{"role": "user", "content": "…"}}, found {short(message)}')
    kept = {key: value for key, value in message.items() if value is not None}
    if kept.get("role") not in ROLES:
        found = short(kept["role"]) if "role" in kept else f"the keys {short(list(message)[:10])}"
        raise WrongLine(f"{where}: expected a role, one of {', '.join(ROLES)}, found {found}")
    content = kept.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise WrongLine(f'{where}: expected parts such as {{"type": "text", "text": "…"}}, found {short(part)}')
    elif content is None and not kept.get("tool_calls"):
        raise WrongLine(f"{where}: expected 'content' or 'tool_calls', found the keys {short(list(kept)[:10])}")
    elif not isinstance(content, str | None):
        raise WrongLine(f"{where}: expected text or a list of text parts in 'content', found {type(content).__name__}")
    if "tool_calls" in kept and not isinstance(kept["tool_calls"], list):
        raise WrongLine(f"{where}: expected a list in 'tool_calls', found {type(kept['tool_calls']).__name__}")
    return kept
