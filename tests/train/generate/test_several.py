"""`jpipe generate` in several processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden"
PROMPTS = "0 1 +", "-"  # of bytes below 50, the symbols of the model
OPTIONS = "--tokenizer", "bytes", "--tokens", "8", "--temperature", "1", "--devices", "3", "--json"


def jpipe(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "jpipe_train.cli", *arguments], capture_output=True, text=True, timeout=300, check=False, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_processes_write_what_one_does(name):
    """Three devices, of which the first process has two; the embedding is tied in gpt2, whose first and last layer are far apart."""
    alone = jpipe("generate", str(GOLDEN / name), *(f"--prompt={prompt}" for prompt in PROMPTS), *OPTIONS)
    both = jpipe("launch", "-n", "2", "--", "generate", str(GOLDEN / name), *(f"--prompt={prompt}" for prompt in PROMPTS), *OPTIONS)
    assert (alone.returncode, both.returncode) == (0, 0), alone.stderr + both.stderr
    assert [json.loads(line) for line in both.stdout.splitlines()] == [json.loads(line) for line in alone.stdout.splitlines()]
    assert len(both.stdout.splitlines()) == len(PROMPTS)
    assert "3 devices (cpu) of 2 processes" in both.stderr


@pytest.mark.slow
def test_a_prompt_of_standard_input_and_a_conversation():
    both = jpipe("launch", "-n", "2", "--", "generate", str(GOLDEN / "llama"), *OPTIONS, input="0 1 +")
    alone = jpipe("generate", str(GOLDEN / "llama"), *OPTIONS, input="0 1 +")
    assert (both.returncode, both.stdout) == (0, alone.stdout), both.stderr
    chat = jpipe("launch", "-n", "2", "--", "generate", str(GOLDEN / "llama"), "--chat")
    assert chat.returncode == 2
    assert "--chat: expected one process, found 2" in chat.stderr
