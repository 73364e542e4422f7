"""Names of commands: a mistyped one is reported with the nearest one, and shells complete them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jpipe_train import cli, commands

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "install.md"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian configs/gpt-bytes.yaml", "unknown command 'trian'; did you mean 'train'?"),
        ("simulat", "unknown command 'simulat'; did you mean 'simulate'?"),
        ("Evaluate runs/0001 --step 4", "unknown command 'Evaluate'; did you mean 'evaluate'?"),
        ("data tokeniser --out t.json", "data: unknown command 'tokeniser'; did you mean 'tokenizer'?"),
        (
            "xyz",
            f"unknown command 'xyz'; known: {', '.join(sorted(commands.names()))}",
        ),
        ("tr\x1b[2Jain", r"unknown command 'tr\x1b[2Jain'; did you mean 'train'?"),
    ],
)
def test_a_mistyped_command_is_reported_with_the_nearest_one(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split(" "))
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"jpipe: {message}\n")


@pytest.mark.parametrize("group", [None, *commands.groups()])
def test_the_names_are_those_of_the_help(group, capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"] if group is None else [group, "--help"])
    assert tuple(re.findall(r"• (\S+)", capsys.readouterr().out)) == commands.names(group)


def test_every_command_is_recognized(capsys):
    for words in ((name,) for name in commands.names()):
        assert commands.unknown(words) is None
    for group in commands.groups():
        assert commands.names(group)
        assert all(commands.unknown((group, name)) is None for name in commands.names(group))
    for words in ((), ("--help",), ("data",), ("data", "--help")):
        assert commands.unknown(words) is None


def completions(script: str, *words: str) -> set[str]:
    """Return the completions that bash offers for these words."""
    listed = " ".join(f"'{word}'" for word in words)
    program = f"""{script}
COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
_tyro_jpipe jpipe "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p jpipe"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    *candidates, how = done.stdout.splitlines()
    assert how == "complete -o default -F _tyro_jpipe jpipe"
    return set(candidates)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_values(capsys):
    assert "jpipe completion bash > " in DOCUMENT.read_text()
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completions(script, "jpipe", "tr") == {"train"}
    assert completions(script, "jpipe", "data", "") >= set(commands.names("data"))
    assert completions(script, "jpipe", "train", "--resume", "") == {"auto", "must", "never"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert "simulate" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--tyro-print-completion", "--tyro-print-completion x", "--tyro_write-completion bash /no/such"])
def test_the_options_of_the_library_lead_to_the_command(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    assert re.fullmatch(r"jpipe: unknown option --tyro\S+; jpipe completion SHELL prints .*\n", capsys.readouterr().err)
