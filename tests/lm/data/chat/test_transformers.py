"""Text, tokens and masks equal those of transformers."""

import json
from pathlib import Path

import pytest

from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.chat import template
from jpipe_lm.data.chat.renderer import Renderer
from jpipe_lm.data.chat.tokens import tokenized
from tests import torch
from tests.lm.data.chat import templates
from tests.lm.data.chat.templates import CONVERSATIONS, STYLES, TOOLS

PROGRAM = """
import json, sys
from transformers import PreTrainedTokenizerFast
results = []
for folder, source, messages, tools in json.load(sys.stdin):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"tools": tools, "chat_template": source}
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **options)
    texts = [tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=asks, **options)
             for part, asks in ((messages, False), (messages[:-1], True))]
    results.append([*texts, found["input_ids"], found["assistant_masks"]])
json.dump(results, sys.stdout)
"""


def theirs(cases: list) -> list:
    """Return what transformers makes of each case, or skip the test if it is not installed."""
    return json.loads(torch.run("-c", PROGRAM, request=json.dumps(cases)))


@pytest.mark.slow
def test_texts_tokens_and_masks_equal_those_of_transformers(chat_folders, tmp_path):
    """Without marks transformers has no mask; then it equals that of the template with marks."""
    reasoning = [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b", "thinking": "c"}]
    conversations = [(messages, tools) for messages, tools, _ in CONVERSATIONS.values()] + [(reasoning, None)]
    cases = [
        (str(chat_folders[style]), templates.template(style, marked=marked), messages, tools)
        for style in STYLES
        for messages, tools in conversations
        if style != "mistral" or tools is None
        for marked in (True, False)
    ]
    own = (
        "{% for m in messages %}{{ m.reasoning_content | default('-') }}|{{ m.name is defined }}|{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    cases.append((str(chat_folders["qwen"]), own, reasoning, TOOLS))
    mask = []
    for (folder, source, messages, tools), (text, prompt, ids, masks) in zip(cases, theirs(cases), strict=True):
        tokenizer = tokenizers.load(Path(folder, "tokenizer.json"), "data.tokenizer")
        (tmp_path / "t.jinja").write_text(source)
        clean = [{key: value for key, value in message.items() if value is not None} for message in messages]
        with Renderer(template.find(tokenizer, str(tmp_path / "t.jinja"))) as renderer:
            (ours,) = tokenized(renderer.answers(clean, tools), tokenizer)
            assert renderer.text(clean[:-1], tools, generation_prompt=True) == prompt
        assert (ours.text, ours.tokens.tolist()) == (text, ids)
        mask = masks if any(masks) else mask
        learned = [int(any(start <= i < stop for start, stop in ours.answers)) for i in range(len(ids))]
        assert learned == mask or source == own
        assert any(mask)


SAVES = """
import json, sys
from transformers import PreTrainedTokenizerFast
(folder, out), tools = json.load(sys.stdin)
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools | tojson }}{{ eos_token }}", "rag": "documents"}
tokenizer.save_pretrained(out)
tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
messages = [{"role": "user", "content": "a"}]
json.dump([tokenizer.apply_chat_template(messages, tokenize=False, tools=each) for each in tools], sys.stdout)
"""


@pytest.mark.slow
def test_a_folder_with_several_templates_is_read_as_transformers_reads_it(chat_folders, tmp_path):
    tools = [None, TOOLS, []]
    request = json.dumps([[str(chat_folders["qwen"]), str(tmp_path / "saved")], tools])
    texts = json.loads(torch.run("-c", SAVES, request=request))
    with Renderer(template.find(tokenizers.load(tmp_path / "saved" / "tokenizer.json", "data.tokenizer"))) as renderer:
        assert [renderer.text([{"role": "user", "content": "a"}], each) for each in tools] == texts
