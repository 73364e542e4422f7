"""Pairs read from files: their rows, and mistakes in them, each reported with its file and line."""

import json
import re

import numpy as np
import pytest

from jpipe import InputError
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_train.config.config import Config
from jpipe_train.data import data
from tests.lm.data.conftest import same
from tests.train.conftest import changed

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
MODEL = {"vocab_size": 300, "seq_len": 40, "depth": 1, "width": 8, "heads": 2}


@pytest.fixture
def config(tiny, tokenizer, tmp_path):
    """Return a function that writes rows to a file and returns a config for them."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)

    def of(rows: list, loss: str = "dpo", seq_len: int = 40, **keys) -> Config:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {"format": "preferences", "path": str(path), "tokenizer": tokenizer, "validation_fraction": 0.4, **keys}
        changes = {"data": fields, "model": MODEL | {"seq_len": seq_len}, "loss": {"name": loss}}
        return changed(tiny | changes, train={"batch_size": 2})

    return of


def texts(count: int = 20) -> list[dict]:
    return [{"prompt": f"the fox {i}", "chosen": f" jumps {i}", "rejected": f" is lazy {i} times"} for i in range(count)]


def test_rows_have_the_tokens_of_prompts_and_only_answers_as_labels(config, tokenizer):
    loaded, rules = data.load(config(texts())), tokenizers.load(tokenizer, "tokenizer")
    inputs, labels = loaded.train[0]
    assert (inputs["tokens"].shape, labels["tokens"].shape, labels["reference"].shape) == ((2, 2, 40), (2, 2, 40), (2, 2))
    assert np.isnan(labels["reference"][:]).all()
    pairs = {}
    for row in texts():
        prompt, *answers = rules.encoded([row["prompt"], row["chosen"], row["rejected"]])
        pairs[tuple(prompt)] = [[*answer, rules.end] for answer in answers]
    for pair in range(2):
        for place in range(2):
            tokens, segments, learned = (part[:][pair, place] for part in (inputs["tokens"], inputs["segments"], labels["tokens"]))
            size = int(segments.sum())
            assert segments.tolist() == [1] * size + [0] * (40 - size)
            answer = learned[learned >= 0].tolist()
            prompt = tuple(tokens[: size + 1 - len(answer)].tolist())
            assert pairs[prompt][place] == answer
            assert tokens[len(prompt) : size].tolist() == answer[:-1]
            assert learned[len(prompt) - 1 : size].tolist() == answer


def test_a_loss_without_reference_has_none_in_its_labels(config):
    loaded = data.load(config(texts(), "simpo"))
    assert set(loaded.train[0][1]) == {"tokens"}
    assert (loaded.unfinished, len(data.load(config(texts())).unfinished)) == ((), 2)


def test_equal_prompts_are_never_in_both_parts(config):
    rows = [row | {"prompt": f"the fox {i // 3}"} for i, row in enumerate(texts(40))]
    loaded = data.load(config(rows, "simpo"))
    train, validation = set(), set()
    for part, number, found in ((loaded.train, 15, train), (loaded.validation, len(loaded.validation), validation)):
        for inputs, labels in (part[b] for b in range(number)):
            chosen = zip(inputs["tokens"][:][:, 0], labels["tokens"][:][:, 0], strict=True)
            found |= {tuple(tokens[: np.argmax(learned >= 0) + 1].tolist()) for tokens, learned in chosen}
    assert len(train) > 1
    assert not train & validation


def test_conversations_may_have_their_prompt_apart_as_text_or_before_the_answers(config, tmp_path):
    user = [{"role": "user", "content": "what does the fox do?"}]
    answers = {name: [{"role": "assistant", "content": content}] for name, content in (("chosen", "it jumps"), ("rejected", "it is lazy"))}
    forms = [
        {"prompt": user, **answers},
        {"prompt": user[0]["content"], **answers},
        {"prompt": "ignored, as in ultrafeedback", **{name: user + answer for name, answer in answers.items()}},
        {name: user + answer for name, answer in answers.items()},
    ]
    template = {"chat_template": str(tmp_path / "template.jinja")}
    loaded = []
    for form in forms:
        whole = config([form], "simpo", **template)
        loaded.append(data.held_out(whole, str(tmp_path / "pairs.jsonl")).validation.with_remainder()[0])
    assert all(same(loaded[0], other) for other in loaded[1:])
    chat = config([{"messages": user + answers["rejected"]}], "simpo", **template)
    fields = {**template, "format": "chat", "path": chat.data.path, "tokenizer": chat.data.tokenizer}
    chat = Config.model_validate({"data": fields, "model": MODEL, "train": {"batch_size": 2}, "plan": {"microbatches": 2}})
    inputs, labels = data.held_out(chat, chat.data.path).validation.with_remainder()[0]
    pairs, learned = loaded[0]
    np.testing.assert_array_equal(pairs["segments"][:][:, 1], inputs["segments"][:])
    np.testing.assert_array_equal((pairs["tokens"][:] * pairs["segments"][:])[:, 1], inputs["tokens"][:])
    np.testing.assert_array_equal(learned["tokens"][:][:, 1], labels[:])


def test_pairs_that_are_too_long_are_errors_or_cut(config):
    rows = [*texts(), {"prompt": "a b", "chosen": " c" * 30, "rejected": " d"}]
    with pytest.raises(
        InputError, match=r"pairs\.jsonl', line 21: expected at most 41 tokens \(model\.seq_len, plus one\), found \d+; correct it, raise"
    ):
        data.load(config(rows))
    loaded = data.load(config([*rows, {"prompt": "a b " * 30, "chosen": " c", "rejected": " d"}], too_long="cut"))
    assert loaded.remarks == ("1 pair left out, because the prompt leaves no room for both answers",)
    with pytest.raises(InputError, match=r"found that none of the 20 pairs leaves room for both answers; raise model\.seq_len"):
        data.load(config(texts(), seq_len=2, too_long="cut"))


USER, BOT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "expected the key 'rejected', found"),
        ({"chosen": "a", "rejected": "b"}, "expected the key 'prompt', found"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "expected an answer in 'chosen', found an empty text"),
        ({"prompt": "a", "chosen": 1, "rejected": "b"}, "expected text in 'chosen', found int"),
        ({"prompt": "a", "chosen": [BOT], "rejected": "b"}, "expected a list of messages in 'rejected', as in the other answer, found str"),
        ({"prompt": [USER], "chosen": [BOT], "rejected": []}, "at the end of 'rejected', found the role user"),
        ({"chosen": [USER, BOT], "rejected": [BOT, BOT]}, "expected the same messages before the last one in 'chosen' and 'rejected'"),
        ({"chosen": [BOT], "rejected": [BOT]}, "expected a prompt, and a message of the assistant at the end of 'chosen'"),
    ],
    ids=range(8),
)
def test_wrong_rows_are_reported_with_their_line(row, message, config, tmp_path):
    template = {"chat_template": str(tmp_path / "template.jinja")}
    with pytest.raises(InputError, match=rf"pairs\.jsonl', line 21: .*{re.escape(message)}"):
        data.load(config([*texts(), row], **template))


def test_columns_have_other_names_if_keys_say_so(config):
    rows = [{"question": row["prompt"], "better": row["chosen"], "worse": row["rejected"]} for row in texts()]
    keys = {"prompt_key": "question", "chosen_key": "better", "rejected_key": "worse"}
    assert same(data.load(config(rows, "simpo", **keys)).train[0], data.load(config(texts(), "simpo")).train[0])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loss": {}}, "data.format preferences needs a loss of preferences; set loss.name to dpo, simpo or orpo"),
        ({"model": {"head": "classification", "labels": 2}}, "model.head classification needs data.format labels"),
        ({"model": {"target": "a:b"}}, "data.format preferences needs a built-in decoder with model.head language"),
        ({"plan": {"slices": 2}}, "data.format preferences needs whole rows; remove plan.slices"),
        ({"data": {"path": "a", "format": "text", "tokenizer": "t"}}, "loss.name has no effect without model.target"),
        (
            {"data": {"path": "a", "format": "text", "tokenizer": "t", "chosen_key": "b"}},
            "chosen_key is for preferences; remove chosen_key",
        ),
        ({"loss": {"arguments": {"beta": 1}}}, "arguments has no effect without target"),
    ],
)
def test_sections_that_contradict_each_other_are_errors(sections, message):
    keys = {"data": {"format": "preferences", "path": "a", "tokenizer": "t"}, "loss": {"name": "dpo"}} | sections
    with pytest.raises(ValueError, match=re.escape(message)):
        Config.model_validate(keys)
