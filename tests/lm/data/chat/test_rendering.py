"""Templates are rendered within limits, and cannot reach anything outside."""

import os
import re

import pytest

from jpipe_lm.data.chat import render_in_child
from jpipe_lm.data.chat.renderer import TRAINING_TIME, Ended, Failure, Limits, Renderer
from jpipe_lm.data.chat.template import Template

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def renderer(source: str, now: str | None = None, **limits: int) -> Renderer:
    return Renderer(
        Template({"default": source}, {"bos_token": "<s>"}, "'x'"), now, Limits(**({"seconds": 1, "characters": 10**6} | limits))
    )


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NESTED, "the template needs more than 1 s or 512 MiB for a conversation, or has ended its process"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ messages[0].content * 10**9 }}", "the template needs too much memory"),
        ("{% set x = 'a' * 10**9 %}", "the template needs too much memory"),
        (
            "{% for i in range(99999) %}aaaaaaaaaaaaaaaaaaaaaa{% endfor %}",
            "expected a conversation of at most 1,000,000 characters, found more",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the template calls itself too often"),
        ("{{" + "(" * 3000 + ")" * 3000 + "}}", "the template calls itself too often"),
        ("{% if %}", "Expected an expression, got 'end of statement block', line 1 of the template"),
        ("{{ raise_exception('no\x1b[2J') }}", r"no\x1b[2J"),
    ],
    ids=["time", "range", "memory", "memory while compiled", "characters", "macro", "parentheses", "syntax", "message"],
)
def test_a_hostile_template_becomes_a_message(source, message):
    with renderer(source) as hostile, pytest.raises(Failure, match=re.escape(message)):
        hostile.answers(MESSAGES)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "messages.__class__.__base__",
        "messages.append(1)",
        "bos_token.__init__.__globals__",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "lipsum.__globals__['os'].popen('id')",
        "namespace.__init__.__globals__.sys",
        "strftime_now.__globals__.sys",
        "raise_exception.__globals__.sys",
        "dict.__class__.__call__.__globals__",
        "namespace(__class__=1)",
        "self.__init__.__globals__.sys",
        "'{0.__class__.__mro__}'.format('')",
        "(messages | map(attribute='__class__') | list)[0].__base__",
        "(messages | attr('__class__')).__base__",
        "[].__reduce__()",
    ],
)
def test_a_template_does_not_reach_the_internals_of_python(expression):
    """Where Jinja gives nothing, nothing is shown."""
    render, _ = render_in_child.compiled("{{ " + expression + " }}", {"bos_token": "<s>"}, 10**6)
    try:
        text = render(None)(MESSAGES, False)[0]
    except Exception as error:
        text = re.sub(".*(unsafe|is not|has no|begins with _|undefined).*", "", str(error))
    assert text == ""


def test_the_process_opens_no_file_and_has_no_secrets(tmp_path, monkeypatch):
    """A template cannot run code, so a function does it here, as a template would that had escaped."""
    monkeypatch.setenv("JPIPE_SECRET", "secret")
    source = render_in_child.__file__
    program = tmp_path / "render_in_child.py"
    escaped = """
def _raise(what):
    import os
    if what == "files":
        open("/etc/hostname")
    if what == "processes":
        os.pipe()
    raise jinja2.exceptions.TemplateError(str(sorted(os.environ)))
"""
    with open(source) as file:
        program.write_text(file.read().replace('\nif __name__ == "__main__":', f'{escaped}\nif __name__ == "__main__":'))
    monkeypatch.setattr("jpipe_lm.data.chat.renderer._PROGRAM", program)
    for what, message in (("files", "Too many open files"), ("processes", "Too many open files"), ("environment", "'PATH'")):
        with renderer("{{ raise_exception('" + what + "') }}") as hostile, pytest.raises(Failure, match=message) as caught:
            hostile.answers(MESSAGES)
        assert "JPIPE_SECRET" not in str(caught.value)


def test_a_process_that_ended_is_started_again_and_none_is_left(tmp_path):
    with renderer("{% if messages[0].content == 'loop' %}" + NESTED + "{% endif %}{{ messages[0].content }}") as one:
        assert one.text(MESSAGES) == "hi"
        (first,) = (process.pid for process in one._processes.values())
        assert one.text(MESSAGES) == "hi"
        assert [process.pid for process in one._processes.values()] == [first]
        with pytest.raises(Ended):
            one.text([{"role": "user", "content": "loop"}])
        assert one.text(MESSAGES) == "hi"
        (last,) = (process.pid for process in one._processes.values())
    for number in (first, last):
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_equal_conversations_give_equal_texts_on_every_day():
    source = "{{ strftime_now('%d %b %Y') }} {{ [1, 2, 3, 4, 5, 6, 7, 8, 9] | random }} {{ 'é<' | tojson }} {{ bos_token }}"
    texts = set()
    for _ in range(2):
        with renderer(source, TRAINING_TIME) as one:
            texts |= {one.text(MESSAGES) for _ in range(3)}
    (text,) = texts
    assert re.fullmatch('26 Jul 2024 [1-9] "é<" <s>', text)


@pytest.mark.parametrize(
    ("source", "spans"),
    [
        ("{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}", ["hi", "yo"]),
        ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}", ["yo;"]),
        ("{% for m in messages %}{{ m.role }}:{{ m.content }}{% if not loop.last %};\n{% endif %}{% endfor %}", [";\nassistant:yo"]),
        ("{% set t %}{% generation %}{{ messages[1].content }}{% endgeneration %}{% endset %}ab{{ t }}", "outside of macros"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}",
            "expected message 2 to begin like the text that add_gen",
        ),
        ("{{ messages[1].content }}", "the template cannot render only the messages up to message 2"),
    ],
    ids=["marks", "prefix", "no end", "moved marks", "other beginning", "undefined"],
)
def test_answers_are_found_or_the_conversation_is_refused(source, spans):
    with renderer(source) as one:
        if isinstance(spans, str):
            with pytest.raises(Failure, match=spans):
                one.answers(MESSAGES)
            return
        ((text, answers, is_marked),) = one.answers(MESSAGES)
    assert [text[start:stop].rstrip() for start, stop in answers] == spans
    assert is_marked == ("generation %" in source)


REASONING = """{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>
{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""Leaves out the reasoning of answers before the last question, as Qwen3's does."""
CLOSING = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""
"""Ends a conversation with one more token, as Phi-3's does."""
TURNS = [
    {"role": role, "content": content, "reasoning_content": f"why {content}"}
    for role, content in (
        ("system", "s"),
        ("user", "a"),
        ("assistant", "call"),
        ("tool", "b"),
        ("assistant", "c"),
        ("user", "d"),
        ("assistant", "e"),
        ("user", "f"),
    )
]


@pytest.mark.parametrize(("source", "each"), [(REASONING, [2, 1]), (CLOSING, [1, 1, 1])], ids=["reasoning", "end of a conversation"])
def test_an_answer_that_later_messages_change_is_learned_as_it_was_at_its_end(source, each):
    """Jinja itself says what the model gets before each answer, and what it should write."""

    def rendered(messages: list, asks: bool) -> str:
        return render_in_child.environment().from_string(source).render(messages=messages, add_generation_prompt=asks)

    expected = {
        (before := rendered(TURNS[:i], True), rendered(TURNS[: i + 1], False).removeprefix(before).rstrip())
        for i, turn in enumerate(TURNS)
        if turn["role"] == "assistant"
    }
    with renderer(source) as one:
        texts = one.answers(TURNS)
        assert [len(found.answers) for found in texts] == each
        learned = [(found.text[:start], found.text[start:stop].rstrip()) for found in texts for start, stop in found.answers]
        assert (len(learned), set(learned)) == (len(expected), expected)
        assert one.answers(TURNS[:2]) == [(rendered(TURNS[:2], False), (), False)]
    with renderer(source, characters=len(texts[0].text) + 10) as small, pytest.raises(Failure, match="of at most"):
        small.answers(TURNS)


def test_parts_of_a_content_are_given_as_they_are_to_a_template_that_knows_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    knows = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    for source, text in ((knows, "[a][b]"), ("{{ messages[0].content }}", "ab"), ("{{ '<' + messages[0].content }}", "<ab")):
        with renderer(source) as one:
            assert one.text([{"role": "user", "content": parts}]) == text
    with renderer(knows) as one:  # a template of a model that reads pictures, too
        assert one.text([{"role": "user", "content": "ab"}]) == "[ab]"
