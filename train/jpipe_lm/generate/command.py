"""Run `jpipe generate` on a terminal or in a pipe. The text goes to standard output, everything else to standard error."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax

from jpipe import InputError
from jpipe_lm.generate import chat
from jpipe_lm.generate.continue_prompts import main
from jpipe_lm.generate.request import Request
from jpipe_train.console import interrupt
from jpipe_train.console.exit_codes import failed
from jpipe_train.console.terminal import fail, first_line, printable
from jpipe_train.launch.team import joined

MOST_BYTES = 2**24  # the most bytes of a prompt on standard input, or of a line of a conversation


def run(request: Request, connect: Callable[[], int], connect_limit: float, wait_limit: float) -> int:
    """Generate text, from standard input if there is no prompt, or hold a conversation, and return the exit code.

    Args:
        connect: connects the processes, and returns how many there are.
        connect_limit: seconds to wait for the other processes at the start.
        wait_limit: seconds without progress after which the processes give up.

    Raises:
        PeerLost: another process died, hung or stopped.
        ReportedElsewhere: another process prints why this process ends.
    """
    try:
        processes = connect()
        with joined(processes, connect_limit, wait_limit) as team:
            if request.is_chat:  # with several processes Ctrl-C ends the command, because they would not stop after the same token
                goes_on = processes == 1 and sys.stdin is not None and sys.stdin.isatty()
                is_complete = chat.main(request, _said, _write, _say, team, goes_on=goes_on)
            else:
                if not request.prompts:  # sent as JSON, which preserves bytes that are not UTF-8
                    request = replace(request, prompts=(json.loads(team.from_first("the prompt", lambda: json.dumps(_read()))),))
                is_complete = main(request, _write, _say, team)
        return 0 if is_complete else 130
    except InputError as error:
        return failed(error)
    except jax.errors.JaxRuntimeError as error:
        return fail(
            f"generate: a device failed: {printable(first_line(error))}; if it lacks memory, use --devices, --dtype or fewer prompts", 1
        )
    except BaseException as error:
        if interrupt.words(error) is None:
            raise
        return fail("interrupted" if request.is_chat else "interrupted before there was any text", 130)


def _said() -> Iterator[str]:
    """Yield each line of standard input that is not empty, without its line end, or raise InputError if it is too long.

    A terminal shows a prompt.
    """
    while sys.stdin is not None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline(MOST_BYTES + 1)
        if len(line) > MOST_BYTES:
            raise InputError(f"standard input: expected at most {MOST_BYTES:,} bytes in a line, found more; give a shorter line")
        if not line:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return
        if text := line.decode("utf-8", "surrogateescape").rstrip("\r\n"):
            yield text


def _read() -> str:
    """Read standard input, without a final line break.

    Raise InputError if it is too long, or a terminal, where a user would not know that the command waits for input.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError(where="--prompt", expected="a text to continue", found="none", change="give --prompt TEXT, or pipe a text in")
    content = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InputError(f"--prompt: expected at most {MOST_BYTES:,} bytes on standard input, found more; give a shorter text")
    return content.decode("utf-8", "surrogateescape").removesuffix("\n")


def _write(text: str) -> None:
    if sys.stdout.isatty():  # a model could generate control sequences
        text = "".join(c if c in "\n\t" else printable(c) for c in text)
    print(text.encode("utf-8", "replace").decode(), end="", flush=True)


def _say(line: str) -> None:
    print(f"jpipe: {printable(line)}", file=sys.stderr, flush=True)
