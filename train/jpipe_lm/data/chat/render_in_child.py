"""Render chat templates within limits of time and memory. `jpipe_lm.data.chat.renderer` runs this file in a separate process.

A template may be untrusted. Jinja's sandbox keeps it from Python's internals; the limits of the process keep it from endless loops and
gigabytes of text. It reads a line of JSON for each request and replies with a line of JSON. It opens no files, and imports nothing from
jpipe. A template can use the same functions as in transformers.
"""

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug  # imported here, because no file can be opened when an error occurs
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

_FIRST = "{% set n = namespace(a='\\n') %}{{ n | pprint }}{{ strftime_now('%c') }}{{ lipsum(1) }}{% generation %}{% endgeneration %}"
"""A template that makes Jinja and Python import the modules that they import lazily."""
_LONGEST_MESSAGE = 500  # the longest error message in characters
_REASONING = "reasoning_content", "thinking", "reasoning"  # the keys of a message for an assistant's reasoning; the first is standard
_MARK = "write a template that marks the answers with {% generation %} … {% endgeneration %}, and name it in data.chat_template"

Message = Mapping[str, Any]
Span = tuple[int, int]
Render = Callable[[Sequence[Message], bool], tuple[str, list[Span]]]


class Refused(Exception):
    """The template cannot render a conversation, or leaves out its answers."""


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`. Its block is an answer of the assistant.

    Attributes:
        tags: the name of the tag.
        is_used: whether a template has the tag.
        before: the number of characters that are rendered before the current block.
        spans: for each block, the position of its first character and the position after its last character.
    """

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.is_used, self.before = False, 0
        self.spans: list[Span] = []
        self._texts: list[str] = []
        environment.extend(generation=self)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Read a block."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def begin(self) -> None:
        """Forget the blocks of an earlier text."""
        self.before, self.spans, self._texts = 0, [], []

    def check(self, text: str) -> None:
        """Check that each block is at its recorded position in the text."""
        if any(text[start:stop] != block for (start, stop), block in zip(self.spans, self._texts, strict=True)):
            raise Refused("expected {% generation %} outside of macros and {% set %} blocks, because its text is not found inside them")

    def _record(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.spans.append((self.before, self.before + len(text)))
        self._texts.append(str(text))
        return text


class _Dict:
    """The function `dict` for templates, without other attributes of the class."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _SafeNamespace(jinja2.utils.Namespace):
    """The function `namespace` for templates, which rejects names that Python uses internally."""

    def __init__(*arguments: Any, **named: Any) -> None:  # a template may call namespace(self=...)
        self, *others = arguments
        values = dict(*others, **named)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}, which begins with _")


def environment(now: datetime | None = None) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the Jinja environment in which templates run, with the functions of transformers; `now` replaces the current time."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: (now or datetime.now()).strftime(form),
        "dict": _Dict(),
        "namespace": _SafeNamespace,
    }
    return sandbox


def compiled(
    source: str, variables: Mapping[str, str], most: int, now: datetime | None = None
) -> tuple[Callable[[Sequence[Any] | None], Render], bool]:
    """Compile a template, which may also use `variables` such as bos_token; its texts have at most `most` characters.

    Return a function that takes the tools and returns a function that renders messages; and whether the template marks answers.
    """
    sandbox = environment(now)
    template = sandbox.from_string(source)
    generation: Generation = getattr(sandbox, "generation")  # noqa: B009 - an attribute that the extension adds

    def with_tools(tools: Sequence[Any] | None) -> Render:
        def render(messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, list[Span]]:
            random.seed(0)  # for the filter `random`: equal conversations give equal texts
            generation.begin()
            texts: list[str] = []
            given = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
            for text in template.generate(**variables, messages=[_with_reasoning(message) for message in messages], **given):
                texts.append(text)
                generation.before += len(text)
                if generation.before > most:
                    raise Refused(f"expected a conversation of at most {most:,} characters, found more")
            whole = "".join(texts)
            generation.check(whole)
            return whole, list(generation.spans)

        return render

    return with_tools, generation.is_used


def with_answers(messages: Sequence[Message], render: Render, is_marked: bool) -> list[tuple[str, list[Span]]]:
    """Render a conversation, and find the answers of the assistant.

    If the template does not mark answers, two texts are rendered: the prompt for an answer (the messages before it and a generation
    prompt), and the conversation up to the end of the answer. The answer is what the second adds to the first. Some templates write an
    answer differently once messages follow it, for example without its reasoning. Then the conversation up to this answer is a separate
    text. So every answer is learned once, after the same text that the model gets as a prompt.

    Return the texts, usually one, each with the position of the first character of each of its answers and the position after the last.
    Raise Refused if an answer does not begin like the generation prompt, or the template cannot render a part of the conversation.
    """
    text, marked = render(messages, False)
    if is_marked:
        return [(text, marked)]
    texts: list[tuple[str, list[Span]]] = [(text, [])]  # the last answer first
    for i in reversed(range(len(messages))):
        if messages[i]["role"] != "assistant":
            continue
        try:
            before = render(messages[:i], True)[0]
            after = text if i == len(messages) - 1 else render(messages[: i + 1], False)[0]
        except Exception as error:
            raise Refused(f"the template cannot render only the messages up to message {i + 1} ({_words(error)}); {_MARK}") from None
        if not after.startswith(before):
            raise Refused(
                f"expected message {i + 1} to begin like the text that add_generation_prompt adds, found another beginning; {_MARK}"
            )
        later, spans = texts[-1]
        end = after if later.startswith(after) else after.rstrip()  # the spaces between messages
        if not (later.startswith(end) and end.startswith(before)):
            spans, end = [], after
            texts.append((after, spans))
        spans.insert(0, (len(before), len(end)))
    if len(texts) > 1 and not texts[0][1]:
        del texts[0]  # this text only adds messages after the last answer
    return texts[::-1]


def with_texts_joined(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the text parts of each content joined into one text."""

    def joined(content: Any) -> Any:
        return "".join(part["text"] for part in content) if isinstance(content, list) else content

    return [{**message, "content": joined(message["content"])} if "content" in message else message for message in messages]


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages with each content that is a text converted to a list of one part."""

    def parted(content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    return [{**message, "content": parted(message["content"])} if "content" in message else message for message in messages]


def reads_only_parts(render: Render) -> bool:
    """Return whether a template ignores content that is plain text. Some templates of multimodal models do."""
    question: list[Message] = [{"role": "user", "content": "question"}]
    try:
        return "question" not in render(question, True)[0] and "question" in render(with_parts(question), True)[0]
    except Exception:
        return False


def answer(request: Mapping[str, Any], render: Render, is_marked: bool, only_parts: bool) -> dict[str, Any]:
    """Return the reply to a request: the texts, each with the spans of its answers.

    The template gets the content unchanged, with two exceptions. Parts are joined into one text if the template does not support parts. A
    text becomes one part if the template supports only parts (`only_parts`).
    """
    messages = request["messages"]

    def reply(messages: Sequence[Message]) -> dict[str, Any]:
        if not request["answers"]:
            return {"texts": [(render(messages, request["generation_prompt"])[0], [])]}
        return {"texts": with_answers(messages, render, is_marked), "is_marked": is_marked}

    if only_parts:
        return reply(with_parts(messages))
    parts = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    if not parts:
        return reply(messages)
    try:
        result = reply(messages)
    except Exception:
        return reply(with_texts_joined(messages))
    is_shown = any(str(part) in text for part in parts for text, _ in result["texts"])
    return reply(with_texts_joined(messages)) if is_shown else result


def _with_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under both usual names."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _words(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "the template needs too much memory"
    if isinstance(error, RecursionError):
        return "the template calls itself too often"
    line = f", line {error.lineno} of the template" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return ((str(error).strip().splitlines() or [type(error).__name__])[0] + line)[:_LONGEST_MESSAGE]


def _limit_process(memory: int) -> None:
    """Limit the resources of the process from now on. It cannot open files or start processes."""
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(what, (most, most))


def _allow_seconds(seconds: int) -> None:
    """Make the system end the process after `seconds` more seconds of computing time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _serve() -> None:
    """Answer requests on standard input until it ends."""
    environment().from_string(_FIRST).render()  # while files can be opened

    def send(reply: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()

    first = json.loads(sys.stdin.readline())
    now = None if first["now"] is None else datetime.fromisoformat(first["now"])
    _limit_process(first["memory"])
    _allow_seconds(first["seconds"])
    try:
        with_tools, is_marked = compiled(first["template"], first["variables"], first["characters"], now=now)
        send({"texts": []})
    except Exception as error:
        send({"error": _words(error)})
        return
    only_parts = None
    for line in sys.stdin:
        _allow_seconds(first["seconds"])
        try:
            request = json.loads(line)
            render = with_tools(request["tools"])
            if only_parts is None:
                only_parts = reads_only_parts(render)
            reply = answer(request, render, is_marked, only_parts)
            if sum(len(text) for text, _ in reply["texts"]) > first["characters"]:
                raise Refused(f"expected at most {first['characters']:,} characters of a conversation, found more")
        except Exception as error:
            reply = {"error": _words(error)}
        send(reply)


if __name__ == "__main__":
    _serve()
