"""Conversations in the styles of three models: their text, the tokens of their answers, and the rows of a run."""

import json
import re
import shutil

import numpy as np
import pytest

from jpipe import InputError
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.chat import template
from jpipe_lm.data.chat.renderer import Ended, Rendered, Renderer
from jpipe_lm.data.chat.tokens import tokenized
from jpipe_train import cli
from jpipe_train.data import data
from tests.lm.data.chat import templates
from tests.lm.data.chat.templates import CONVERSATIONS, STYLES
from tests.lm.data.conftest import same
from tests.train.conftest import changed

ENDS = {style: end for style, (_, _, end) in STYLES.items()}


@pytest.mark.parametrize("marked", [False, True], ids=["prefixes", "marks"])
@pytest.mark.parametrize("style", STYLES)
def test_what_the_assistant_writes_is_learned_with_the_end_of_its_turn(style, marked, chat_folders, tmp_path):
    tokenizer = tokenizers.load(chat_folders[style] / "tokenizer.json", "data.tokenizer")
    (tmp_path / "marked.jinja").write_text(templates.template(style, marked=True))
    found = template.find(tokenizer, str(tmp_path / "marked.jinja") if marked else None)
    with Renderer(found) as renderer:
        for messages, tools, answers in CONVERSATIONS.values():
            if style == "mistral" and tools:
                continue
            (conversation,) = tokenized(renderer.answers(messages, tools), tokenizer)
            assert tokenizer.rules.decode(conversation.tokens.tolist(), skip_special_tokens=False) == conversation.text
            learned = [
                tokenizer.rules.decode(conversation.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in conversation.answers
            ]
            expected = [answer[style] if isinstance(answer, dict) else answer for answer in answers]
            before = " " if style == "mistral" else ""
            assert learned == [f"{before}{answer}{ENDS[style]}" for answer in expected]
            assert conversation.text.count(STYLES[style][1]) == (style != "qwen")  # the template begins the text, and nothing else does


def test_tokens_at_the_edge_of_an_answer_are_learned(chat_folders):
    """Where a token has characters of an answer and others, it belongs to the answer; between two answers to the first."""
    tokenizer = tokenizers.load(chat_folders["qwen"] / "tokenizer.json", "data.tokenizer")
    text = "a 日本<|im_end|> \n<|im_end|>x"
    for is_marked, ranges in ((True, [(2, 12)]), (False, [(2, 12)])):
        (found,) = tokenized([Rendered(text, ((2, len(text) - 1),), is_marked)], tokenizer)
        assert [(int(a), int(b)) for a, b in found.answers] == ranges
    (found,) = tokenized([Rendered("a日b", ((0, 2), (1, 3)))], tokenizer)
    assert found.answers == [(0, 4), (4, 5)]
    pair = next(token for token in sorted(tokenizer.rules.get_vocab()) if len(token) == 2 and token.isascii() and token.isalpha())
    for span in ((0, 1), (1, 2)):
        (found,) = tokenized([Rendered(pair, (span,))], tokenizer)
        assert found.answers == [(0, 1)]
    for is_marked, last in ((True, "\n"), (False, "<|im_end|>")):
        (found,) = tokenized([Rendered("ab<|im_end|>\nc", ((1, 13),), is_marked)], tokenizer)
        assert tokenizer.rules.id_to_token(int(found.tokens[found.answers[0][1] - 1])) == last.replace("\n", "Ċ")


def written(path, lines) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def configured(tiny, folder, path, **keys):
    fields = {"format": "chat", "path": path, "tokenizer": str(folder / "tokenizer.json"), "validation_path": path} | keys
    return changed(tiny | {"data": fields}, model={"vocab_size": 512, "seq_len": keys.pop("seq_len", 200)})


def test_conversations_are_packed_and_kept_apart(tiny, chat_folders, tmp_path):
    lines = [{"messages": messages, "tools": tools} for messages, tools, _ in CONVERSATIONS.values()]
    lines.insert(1, {"messages": [{"role": "user", "content": "alone"}]})
    path = written(tmp_path / "a.jsonl", lines)
    config = changed(configured(tiny, chat_folders["qwen"], path).model_dump(), model={"seq_len": 600})
    loaded = data.load(config)
    assert loaded.remarks[0] == f"2 empty documents left out, the first is '{path}', line 2"  # in training and in validation
    inputs, labels = (rows[:] for rows in (loaded.train[0][0]["tokens"], loaded.train[0][1]))
    segments = loaded.train[0][0]["segments"][:]
    assert (inputs.shape, sorted(set(segments[0].tolist()))) == ((4, 600), [0, 1, 2, 3])
    tokenizer = tokenizers.load(config.data.tokenizer, "data.tokenizer")
    starts = [np.flatnonzero(segments[0] == number)[0] for number in (1, 2, 3)]
    assert [tokenizer.rules.id_to_token(int(inputs[0, start])) for start in starts] == ["<|im_start|>"] * 3
    learned = tokenizer.rules.decode(labels[0][labels[0] >= 0].tolist(), skip_special_tokens=False)
    expected = [
        f"{answer['qwen'] if isinstance(answer, dict) else answer}<|im_end|>"
        for *_, answers in CONVERSATIONS.values()
        for answer in answers
    ]
    assert learned == "".join(expected)
    assert loaded.digest() == data.load(config).digest()


def test_a_prepared_folder_has_the_same_rows_and_the_template(tiny, chat_folders, tmp_path):
    lines = [
        {"messages": [*messages, {"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i}"}], "tools": tools}
        for messages, tools, _ in CONVERSATIONS.values()
        for i in range(6)
    ]
    path = written(tmp_path / "a.jsonl", lines)
    tokenizer = str(chat_folders["qwen"] / "tokenizer.json")
    command = ["data", "prepare", path, "--format", "chat", "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--validation-fraction", "0.5", "--shard-tokens", "300"]) == 0
    fields = {"format": "chat", "path": path, "tokenizer": tokenizer, "validation_fraction": 0.5}
    one = data.load(changed(tiny | {"data": fields}, model={"vocab_size": 512, "seq_len": 400}))
    fields = {"format": "tokens", "path": str(tmp_path / "out")}
    other = data.load(changed(tiny | {"data": fields}, model={"vocab_size": 512, "seq_len": 400}))
    for i in range(3):
        assert same(one.train[i], other.train[i])
    assert same(one.validation[0], other.validation[0])
    index = json.loads((tmp_path / "out" / "tokens.json").read_text())
    assert (index["kind"], len(index["train"]) > 1) == ("chat", True)
    copied = tokenizers.load(tmp_path / "out" / "tokenizer.json", "data.path")
    assert copied.rules.id_to_token(index["end_of_text"]) == "<|im_end|>"
    assert template.find(copied).source() == templates.template("qwen", marked=False)
    (tmp_path / "out" / "train-00000.answer_ends").unlink()
    with pytest.raises(InputError, match=r"train-00000\.answer_ends' with \d+ bytes, found no such file"):
        data.load(changed(tiny | {"data": fields}))


def test_long_conversations_are_refused_with_their_line_or_cut(tiny, chat_folders, tmp_path):
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 500}]
    path = written(tmp_path / "a.jsonl", ["", {"messages": long}])
    with pytest.raises(
        InputError, match=r"a\.jsonl', line 2: expected at most 201 tokens \(model\.seq_len 200, plus one\), found \d+; shorten"
    ):
        data.load(configured(tiny, chat_folders["qwen"], path))
    labels = data.load(configured(tiny, chat_folders["qwen"], path, too_long="cut")).train[0][1][:]
    assert labels[0, -1] >= 0


MESSAGE = {"role": "user", "content": "a"}
WRONG = {
    "key": ({"prompt": "a"}, r"line 1: expected the key 'messages', found \['prompt'\]"),
    "empty": ({"messages": []}, r"expected a list of messages in 'messages', found an empty one"),
    "text": ({"messages": ["a"]}, r"message 1: expected an object such as \{\"role\": \"user\", .* found 'a'"),
    "role": (
        {"messages": [MESSAGE, MESSAGE | {"role": "bot"}]},
        r"message 2: expected a role, one of system, user, assistant, tool, found 'bot'",
    ),
    "from": ({"messages": [{"from": "human", "value": "a"}]}, r"message 1: expected a role, .*, found the keys \['from', 'value'\]"),
    "content": ({"messages": [{"role": "user", "content": None}]}, r"expected 'content' or 'tool_calls', found the keys \['role'\]"),
    "number": ({"messages": [{"role": "user", "content": 3}]}, r"expected text or a list of text parts in 'content', found int"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"expected parts such as .* found \{'type': 'image'\}"),
    "tools": ({"messages": [MESSAGE], "tools": "[]"}, r"expected a list of objects in 'tools', found '\[\]'"),
    "surrogate": ({"messages": [MESSAGE | {"content": "\ud800"}]}, r"the chat template fails: expected characters, found half a character"),
    "roles": ({"messages": [MESSAGE, MESSAGE]}, r"the chat template fails: Conversation roles must alternate user/assistant"),
    "json": ("{", r"line 1: expected a JSON object, found '\{"),
}


@pytest.mark.parametrize(("line", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_line_is_named(line, message, tiny, chat_folders, tmp_path):
    hint = "change the template" if "template" in message else "remove it"
    with pytest.raises(InputError, match=rf"^data\.path: '.*a\.jsonl', .*{message}.*; correct it, or {hint}$"):
        data.load(configured(tiny, chat_folders["mistral"], written(tmp_path / "a.jsonl", [line])))


def test_several_wrong_lines_are_named_together(tiny, chat_folders, tmp_path):
    path = written(tmp_path / "a.jsonl", [{"messages": [MESSAGE, {"role": "assistant", "content": "a"}]}, {"messages": [MESSAGE] * 2}, 3])
    with pytest.raises(InputError, match=r"2 lines are wrong: '.*', line 2: the chat template fails: Conversation roles .*; '.*', line 3"):
        data.load(configured(tiny, chat_folders["mistral"], path))


def test_a_template_that_leaves_out_earlier_reasoning_gives_a_text_for_each_question(tiny, chat_folders, tmp_path, capsys):
    source = templates.template("qwen", marked=False).replace(
        "{{- message.content }}", "{{- message.content.split('</think>')[-1] if not loop.last else message.content }}", 1
    )
    (tmp_path / "t.jinja").write_text(source)
    answer = {"role": "assistant", "content": "<think>so</think>yes"}
    path = written(tmp_path / "a.jsonl", [{"messages": [MESSAGE, answer] * 2}] * 2)
    config = configured(tiny, chat_folders["qwen"], path, chat_template=str(tmp_path / "t.jinja"))
    loaded = data.load(config)
    assert loaded.remarks[0] == (
        "4 conversations learned as several texts, because the chat template writes an answer differently once messages follow it"
    )
    tokenizer = tokenizers.load(config.data.tokenizer, "data.tokenizer")
    labels = loaded.train[0][1][:]
    learned = tokenizer.rules.decode(labels[0][labels[0] >= 0].tolist(), skip_special_tokens=False)
    assert learned.replace("<think>so</think>yes<|im_end|>", "") == ""
    (tmp_path / "c.yaml").write_text(json.dumps({"data": config.model_dump()["data"]}))
    assert cli.main(["data", "show", str(tmp_path / "c.yaml"), "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"line (\d), text (\d) of 2", shown) == [("1", "1"), ("1", "2")]
    assert shown.count("[[<think>so</think>yes<|im_end|>]]") == 2


def test_a_template_that_cannot_be_compiled_is_one_error(tiny, chat_folders, tmp_path):
    """It is tried once, and not for each line."""
    (tmp_path / "t.jinja").write_text("{% if %}")
    path = written(tmp_path / "a.jsonl", [{"messages": [MESSAGE]}] * 100)
    with pytest.raises(
        InputError, match=r"^chat template: '.*t\.jinja': Expected an expression, .*; correct the template, or choose another one$"
    ):
        data.load(configured(tiny, chat_folders["qwen"], path, chat_template=str(tmp_path / "t.jinja")))


TEMPLATES = {
    "none": (
        {},
        None,
        r"data\.chat_template: expected a chat template next to '.*tokenizer\.json' \(chat_template\.jinja, or chat_template in tok",
    ),
    "other": ({"chat_template": 3}, None, r"tokenizer_config\.json': chat_template: expected a template, or a list .*, found int"),
    "no default": ({"chat_template": [{"name": "rag", "template": "x"}]}, None, r"one with the name 'default', found \['rag'\]"),
    "large": ({"chat_template": "x" * 2**21}, None, r"chat_template: expected at most 1,048,576 bytes, found 2,097,152"),
    "no json": ("[", None, r"expected a JSON object in '.*tokenizer_config\.json', found something else"),
    "no file": ({}, "missing.jinja", r"data\.chat_template: cannot read 'missing\.jinja': No such file"),
}


@pytest.mark.parametrize(("settings", "chosen", "message"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_cannot_be_found_or_read_is_reported(settings, chosen, message, chat_folders, tmp_path):
    shutil.copyfile(chat_folders["qwen"] / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    with pytest.raises(InputError, match=message):
        template.find(tokenizers.load(tmp_path / "tokenizer.json", "data.tokenizer"), chosen)


def test_templates_are_found_where_transformers_finds_them(chat_folders, tmp_path):
    """The files of templates come first; conversations with tools have one of their own, whichever came before them."""

    def found(*tools: list | None) -> list[str]:
        with Renderer(template.find(tokenizers.load(tmp_path / "tokenizer.json", "data.tokenizer"))) as renderer:
            return [renderer.text([MESSAGE], each) for each in tools]

    shutil.copyfile(chat_folders["qwen"] / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert found(None, [{}]) == ["of a processor"] * 2
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "E"}))
    assert found(None, [{}], None, []) == ["plain", "with tools", "plain", "with tools"]
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert found(None, [{}]) == ["fileE"] * 2
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file with tools")
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("file with documents")
    assert found(None, [{}]) == ["fileE", "file with tools"]
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(
        InputError, match=r"additional_chat_templates': expected chat_template\.jinja beside it, found \['rag', 'tool_use'\]"
    ):
        found(None)


def test_show_prints_the_text_with_what_is_learned(chat_folders, tmp_path, capsys):
    messages = [{"role": "user", "content": "a\x1b[2J"}, {"role": "assistant", "content": "b\u202ec"}]
    path = written(tmp_path / "a.jsonl", [{"messages": messages}] * 4)
    config = {"data": {"format": "chat", "path": path, "tokenizer": str(chat_folders["mistral"] / "tokenizer.json")}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    assert cli.main(["data", "show", str(tmp_path / "c.yaml"), "--count", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"'{path}', line 1: \d+ tokens, 7 learned", shown[0])
    assert shown[1:3] == [r"<s>[INST] a\x1b[2J [/INST][[ b\u202ec</s>]]", ""]
    assert len(shown) == 6
    for arguments, message in (
        (["--count", "0"], "--count: expected 1 or more"),
        (["--set", "data={path: x}"], "expected a config with data.format chat, found auto"),
    ):
        assert cli.main(["data", "show", str(tmp_path / "c.yaml"), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_nothing_is_read_after_a_conversation_that_ends_the_process_of_the_template(tiny, chat_folders, tmp_path, monkeypatch):
    path = written(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS["short"][0]}] * 3)
    rendered = []

    def answers(self, messages, tools):
        rendered.append(messages)
        raise Ended("the template needs more than 10 s")

    monkeypatch.setattr(Renderer, "answers", answers)
    message = r"^data\.path: '.*a\.jsonl', line 1: the template needs more than 10 s; remove the conversation, or change the template$"
    with pytest.raises(InputError, match=message):
        data.load(configured(tiny, chat_folders["qwen"], path))
    assert len(rendered) == 1
