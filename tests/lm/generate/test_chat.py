"""Conversations on standard input, and texts that end before a string."""

import json
import re
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe_lm.data import tokenizer
from jpipe_lm.data.chat import template
from jpipe_lm.data.chat.renderer import Renderer
from jpipe_lm.data.chat.tokens import end_of_turn
from jpipe_lm.generate import command
from jpipe_lm.generate.token_text import Stops
from tests.lm.generate.conftest import TEMPLATE, make_chat

RUN = "run"  # see the fixture `run_of_bytes`


@pytest.fixture
def folder(folder) -> Path:
    """Return a Hugging Face folder of a model for chat."""
    make_chat(folder)
    return folder


@pytest.mark.slow
def test_a_conversation_has_all_that_was_said_before(run, folder):
    options = str(folder), "--tokens", "4", "--json"
    code, out, _ = run(*options, "--chat", "--system", "w7", said="w3 w10 w60\n\nw5 w6\r\n")
    assert code == 0
    first, second = map(json.loads, out.splitlines())
    assert [first["prompt"], second["prompt"]] == ["w3 w10 w60", "w5 w6"]
    before = "<s>w7<s>w3 w10 w60"
    after = f"{before}<s>{first['text']}w31<s>w5 w6"
    alone = [json.loads(line)["text"] for line in run(*options, "--prompt", before, "--prompt", after)[1].splitlines()]
    assert [first["text"], second["text"]] == alone


def test_an_answer_ends_with_its_token_and_says_what_else_ended_it(run, folder):
    code, out, err = run(str(folder), "--chat", said="w3 w10 w60\n")
    assert code == 0
    assert 4 < len(out.split()) < 20
    assert "stopped after" not in err
    code, short, err = run(str(folder), "--chat", "--tokens", "2", said="w3 w10 w60\n")
    assert (code, short.split(), short[-1]) == (0, out.split()[:2], "\n")
    assert "stopped after 2 tokens; --tokens N allows more" in err
    assert "tokens in" not in err


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TEMPLATE, ([31], [])),
        (TEMPLATE.replace("w31", " w30 "), ([], ["w30"])),
        (TEMPLATE.replace("w31", ""), ([], [])),
        (TEMPLATE + "{% if add_generation_prompt %}<s>{% endif %}", ([31], [])),
        ("{{ raise_exception('no') }}", ([], [])),
    ],
    ids=["token", "text", "nothing", "other beginning", "failure"],
)
def test_what_ends_an_answer_is_found_in_the_template(source, expected, folder):
    (folder / "chat_template.jinja").write_text(source)
    loaded = tokenizer.load(folder / "tokenizer.json", "--tokenizer")
    with Renderer(template.find(loaded)) as renderer:
        assert end_of_turn(renderer, loaded) == expected


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(run, folder, monkeypatch, interruptible):
    written = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) in (2, 5):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "_write", write)
    code, _, err = run(str(folder), "--chat", said="w3 w10 w60\nw3\nw5\n", is_terminal=True)
    assert code == 0
    assert err.count("> ") == 4
    assert "".join(written).count("\n") == 3
    assert len(written) > 7
    written.clear()
    assert run(str(folder), "--chat", said="w3 w10 w60\nw3\n")[0] == 130
    assert "".join(written).count("\n") == 1


def test_a_conversation_leaves_no_process(run, folder, monkeypatch):
    processes = []
    monkeypatch.setattr(Renderer, "close", lambda self, close=Renderer.close: (processes.extend(self._processes.values()), close(self)))
    assert run(str(folder), "--chat", said="w3\n")[0] == 0
    assert processes[-1].returncode is not None


REFUSED = {
    "bytes": ((RUN, "--chat"), "--chat: expected a model with a tokenizer and a chat template, found a model of bytes"),
    "prompt": ((RUN, "--chat", "--prompt", "a"), "--prompt has no effect with --chat"),
    "system": ((RUN, "--prompt", "a", "--system", "b"), "--system has no effect without --chat"),
    "stop": ((RUN, "--prompt", "a", "--stop", ""), "--stop: expected a text that ends the output, found an empty text"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("run_of_bytes")
def test_mistakes_are_refused_in_words(arguments, message, run):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_what_a_template_or_a_model_cannot_take_ends_the_conversation(run, folder):
    code, out, err = run(str(folder), "--chat", "--tokens", "2", said=f"w3 w10 w60\n{'w4 ' * 60}\n")
    assert (code, len(out.split())) == (2, 2)
    assert re.search(r"the conversation: expected at most \d+ tokens, .* found \d+; begin a new conversation", err)
    assert "standard input: expected text in UTF-8, found the byte 0xff at 1" in run(str(folder), "--chat", said="a\udcff\n")[2]
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    assert "chat template: no system; use a model with a template for such" in run(str(folder), "--chat", said="a\n")[2]
    (folder / "chat_template.jinja").unlink()
    assert "expected a chat template next to" in run(str(folder), "--chat", said="a\n")[2]


def test_a_text_ends_before_a_stop_string_that_spans_tokens_and_no_part_of_it_is_written(run, folder, monkeypatch):
    options = str(folder), "--prompt", "w5", "--tokens", "12"
    whole = run(*options)[1].removesuffix("\n")
    space = whole.index(" ", len(whole) // 2)
    stop = whole[space - 1 : space + 2]
    written = []
    monkeypatch.setattr(command, "_write", written.append)
    assert run(*options, "--stop", "never", "--stop", stop)[0] == 0
    assert "".join(written) == whole[: whole.index(stop)] + "\n"
    written.clear()
    assert run(*options, "--stop", stop, "--json")[0] == 0
    answer = json.loads("".join(written))
    assert (answer["text"], answer["end"]) == (whole[: whole.index(stop)], "stop")
    written.clear()
    assert run(*options, "--stop", f"{whole[-2:]}!")[0] == 0  # the text ends inside it
    assert "".join(written) == whole + "\n"


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_where_a_text_ends_does_not_depend_on_its_pieces(text, stops, data):
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    found, given_out, at = Stops(stops), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        more, stopped = found.add(text[at : at + size])
        given_out += more
        at += size
        assert expected.startswith(given_out)
        if stopped:
            assert given_out == expected
            return
    assert not ends
    assert given_out + found.remainder() == expected
