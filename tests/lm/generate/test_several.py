"""`jpipe generate` in several processes."""

import json
import signal
import subprocess
import sys

import pytest

from jpipe_train import cli
from tests.lm.generate.conftest import GOLDEN, make_chat

PROMPTS = "0 1 +", "-"  # of bytes below 50, the symbols of the model
OPTIONS = "--tokenizer", "bytes", "--tokens", "8", "--temperature", "1", "--devices", "3", "--json"


def jpipe(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "jpipe_train.cli", *arguments], capture_output=True, text=True, timeout=300, check=False, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_two_processes_write_what_one_does(name, capsys):
    """Three devices, of which the first process has two; the embedding is tied in gpt2, whose first and last layer are far apart."""
    command = "generate", str(GOLDEN / name), *(f"--prompt={prompt}" for prompt in PROMPTS), *OPTIONS
    assert cli.main([*command]) == 0
    alone, both = capsys.readouterr().out, jpipe("launch", "-n", "2", "--", *command)
    assert both.returncode == 0, both.stderr
    assert [json.loads(line) for line in both.stdout.splitlines()] == [json.loads(line) for line in alone.splitlines()]
    assert len(both.stdout.splitlines()) == len(PROMPTS)
    assert "3 devices (cpu) of 2 processes" in both.stderr


@pytest.mark.exhaustive
def test_a_prompt_of_standard_input_is_that_of_all_processes():
    both = jpipe("launch", "-n", "2", "--", "generate", str(GOLDEN / "llama"), *OPTIONS, input="0 1 +")
    alone = jpipe("generate", str(GOLDEN / "llama"), *OPTIONS, input="0 1 +")
    assert (both.returncode, both.stdout) == (0, alone.stdout), both.stderr


@pytest.mark.exhaustive
def test_a_conversation_is_that_of_one_process(folder):
    """The third line cannot be answered: all processes end, and one says why."""
    make_chat(folder)
    options = "generate", str(folder), "--chat", "--system", "w7", "--tokens", "4", "--temperature", "1", "--devices", "3", "--json"
    alone = jpipe(*options, input="w3 w10 w60\n\nw5 w6\n")
    both = jpipe("launch", "-n", "2", "--", *options, input="w3 w10 w60\n\nw5 w6\n")
    assert (alone.returncode, both.returncode, both.stdout) == (0, 0, alone.stdout), both.stderr
    assert len(both.stdout.splitlines()) == 2
    failed = jpipe("launch", "-n", "2", "--", *options, input=f"w3 w10 w60\n{'w4 ' * 60}\n")
    assert (failed.returncode, len(failed.stdout.splitlines())) == (2, 1)
    assert failed.stderr.count("begin a new conversation") == 1
    silent = jpipe("launch", "-n", "2", "--", *options, stdin=subprocess.DEVNULL)
    assert (silent.returncode, silent.stdout) == (2, "")
    assert "--chat: expected lines on standard input, found none" in silent.stderr


@pytest.mark.exhaustive
def test_ctrl_c_ends_a_conversation_in_all_processes(folder):
    """The second line never comes."""
    make_chat(folder)
    command = sys.executable, "-m", "jpipe_train.cli", "launch", "-n", "2", "--", "generate", str(folder), "--chat", "--tokens", "3"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as launched:
        launched.stdin.write("w3 w10 w60\n")
        launched.stdin.flush()
        answer = launched.stdout.readline()
        launched.send_signal(signal.SIGINT)
        launched.wait(timeout=120)  # standard input stays open: its end would end the conversation, too
        err = launched.stderr.read()
    assert len(answer.split()) == 3
    assert launched.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
