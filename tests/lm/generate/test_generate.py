"""`jpipe generate`: text on standard output, all else on standard error, one clear message for each mistake."""

import io
import json
import re
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpipe_lm.generate import command, model_source
from jpipe_lm.generate.request import Request
from jpipe_lm.models.layers import layers
from tests.lm.generate.conftest import WORDS, save_tokenizer
from tests.lm.models.running import applied
from tests.train.conftest import changed

GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden"
RUN = "run"  # see the fixture `run_of_bytes`
LAST = 31  # a token that the model comes to, after some others


def likeliest(folder: Path, rows: list[list[int]]) -> np.ndarray:
    """Return the likeliest token after each token, computed by the whole model."""
    source = model_source.find(Request(str(folder)), print)
    stack = layers(source.config)
    params = model_source.parameters(source, dict.fromkeys(stack.ids, jax.devices()[0]), lambda: None)
    tokens = np.zeros((len(rows), source.config.max_positions_used), np.int32)
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    return np.argmax(applied(stack, stack.ties.split(params), tokens), axis=-1)


@pytest.mark.slow
def test_a_hugging_face_folder_answers_several_prompts_as_json(run, folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [LAST, 99999]}))
    code, out, err = run(str(folder), "--prompt", "w3 w10 w60", "--prompt", "", "--tokens", "14", "--json")
    assert code == 0, err
    texts = [json.loads(line) for line in out.splitlines()]
    assert [text["prompt"] for text in texts] == ["w3 w10 w60", ""]
    assert [text["end"] for text in texts] == ["end of text", "tokens"]
    prompts = [3, 10, 60], [1]  # an empty one begins with <s>, says config.json
    rows = [[*prompt, *map(WORDS.index, text["text"].split())] for prompt, text in zip(prompts, texts, strict=True)]
    assert [text["tokens"] for text in texts] == [len(row) - len(prompt) for prompt, row in zip(prompts, rows, strict=True)]
    for prompt, row, follows, last in zip(prompts, rows, likeliest(folder, rows), (LAST, None), strict=True):
        whole = row if last is None else [*row, last]
        assert whole[len(prompt) :] == follows[len(prompt) - 1 : len(whole) - 1].tolist()
    assert len(rows[0]) > 4
    assert len(rows[1]) == 15
    assert re.search(r"^jpipe: \d+ tokens in [\d.]+ s", err, re.MULTILINE)


@pytest.mark.slow
def test_tokens_that_the_tokenizer_does_not_have_are_never_chosen(run, folder):
    """Neither are unused ids between those of the tokenizer, which the model prefers."""
    arrays = load_file(folder / "model.safetensors")
    arrays["lm_head.weight"][1::2] *= 100
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(folder, [word if i % 2 == 0 else None for i, word in enumerate(WORDS)])
    for options in ((), ("--top-p", "0.9"), ("--top-k", "40")):
        _, out, _ = run(str(folder), "--prompt", "w4", "--tokens", "12", "--json", *options)
        answer = json.loads(out)
        assert answer["tokens"] == 12
        assert len(answer["text"].split()) == 12


@pytest.mark.slow
@pytest.mark.usefixtures("run_of_bytes")
def test_a_run_of_bytes_from_standard_input_and_a_pipe(run):
    code, out, err = run(RUN, said="the\n")
    assert code == 0
    assert len(out.encode()) >= 6  # what the model has not learned may be no UTF-8
    assert out.endswith("\n")
    assert "step 4; float32, 1 device (cpu)" in err
    assert "stopped after 5 tokens: the model has no more than 8 positions" in err
    assert run(RUN, "--prompt", "the")[1] == out


@pytest.mark.slow
@pytest.mark.usefixtures("run_of_bytes")
def test_a_prompt_that_is_no_utf_8_is_refused_with_a_tokenizer_and_taken_as_bytes_without(run, folder):
    prompt = "w3 \N{COPYRIGHT SIGN}\udcff w5"
    code, out, err = run(str(folder), "--prompt", prompt)
    assert (code, out) == (2, "")
    assert "prompt 1: expected text in UTF-8, found the byte 0xff at 5; convert it to UTF-8" in err
    assert run(RUN, "--prompt", "\udcff", "--tokens", "1")[0] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("run_of_bytes")
def test_several_texts_come_one_after_the_other_under_their_prompts(run):
    alone = [run(RUN, "--prompt", prompt, "--tokens", "3")[1] for prompt in ("a", "fox")]
    code, out, err = run(RUN, "--prompt", "a", "--prompt", "fox", "--tokens", "3")
    assert (code, out) == (0, "".join(alone))
    assert re.findall(r"^jpipe: (prompt .*)$", err, re.MULTILINE) == ["prompt 1: 'a'", "prompt 2: 'fox'"]


def test_ctrl_c_ends_the_text_without_a_traceback(run, folder, monkeypatch, interruptible):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    written = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "_write", write)
    code, _, err = run(str(folder), "--prompt", "w5", "--tokens", "12")
    assert code == 130
    assert "interrupted after 2 tokens" in err
    assert len(written) == 3
    assert written[-1].endswith("\n")


def test_generated_text_does_not_control_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", screen)
    command._write("a\n\tb\x1b[2J\u202eé")
    assert screen.getvalue() == "a\n\tb\\x1b[2J\\u202eé"


FOX = "--prompt", "fox"
REFUSED = {
    "no such folder": (["runs/0099", *FOX], r"there is no folder 'runs/0099'; give a run folder"),
    "a folder of nothing": ([str(GOLDEN), *FOX], r"expected checkpoints in .*, found none"),
    "adapters": (
        ["peft", *FOX],
        r"generate: 'peft' has an adapter_config\.json: .* give the folder of the model, and .* --adapters",
    ),
    "a file": (["run/config.yaml", *FOX], r"expected a run folder or a folder in Hugging Face's layout, found the file"),
    "bert": ([str(GOLDEN / "bert"), *FOX], r"expected a decoder \(model\.kind\), found bert in .* does not predict the next token"),
    "no tokenizer": ([str(GOLDEN / "gpt2"), *FOX], r"expected a tokenizer\.json in '.*gpt2', found none; give --tokenizer FILE"),
    "no such tokenizer": ([RUN, *FOX, "--tokenizer", "no.json"], r"--tokenizer: cannot read 'no\.json'"),
    "another's": ([str(GOLDEN / "gpt2"), *FOX, "--tokenizer", "bytes"], r"prompt 1: expected tokens below 64 .*, found 120, 'x'"),
    "a step of a folder": ([str(GOLDEN / "gpt2"), *FOX, "--step", "3"], r"--step: expected a run folder"),
    "an average of a folder": ([str(GOLDEN / "gpt2"), *FOX, "--weights", "ema"], r"--weights: expected a run folder"),
    "no such step": ([RUN, *FOX, "--step", "3"], r"--step: expected one of 4, .* found 3"),
    "no average": ([RUN, *FOX, "--weights", "ema"], r"--weights: the checkpoint of step 4 has no moving average"),
    "empty": (
        [RUN, "--prompt", ""],
        r"prompt 1: expected a text, found an empty text, and the model has no token that begins a text",
    ),
    "long": (
        [RUN, *FOX, "--prompt", "the fox "],
        r"prompt 2: expected at most 7 tokens, .* 8 positions .* found 8; make it shorter",
    ),
    "tokens": ([RUN, *FOX, "--tokens", "0"], r"--tokens: expected from 1 to 10,000,000, found 0"),
    "top-p": ([RUN, *FOX, "--top-p", "0"], r"--top-p: expected a probability above 0, at most 1, found 0"),
    "top-k": ([RUN, *FOX, "--top-k", "0"], r"--top-k: expected 1 or more tokens, found 0"),
    "temperature": ([RUN, *FOX, "--temperature", "nan"], r"--temperature: expected a number from 0 .* found nan"),
    "greedy top-p": ([RUN, *FOX, "--top-p", "0.5", "--temperature", "0"], r"--top-p has no effect with --temperature 0"),
    "seed": ([RUN, *FOX, "--seed", "-1"], r"--seed: expected from 0 to 4294967295, found -1"),
    "float16": ([RUN, *FOX, "--dtype", "float16"], r"--dtype: expected float32 or bfloat16, because CPUs"),
    "devices": ([RUN, *FOX, "--devices", "4"], r"--devices: expected from 1 to 3, because the model has 3 layers, found 4"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("run_of_bytes")
def test_mistakes_are_refused_in_words(run, arguments, message, tmp_path):
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text("{}")
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert re.search(f"^jpipe: .*{message}", err, re.MULTILINE), err


@pytest.mark.usefixtures("run_of_bytes")
def test_a_terminal_without_a_prompt_and_input_without_end_are_refused(run, monkeypatch):
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        assert re.search("expected at most 16,777,216 bytes on standard input, found more", run(RUN)[2])
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", screen)
    assert re.search("expected a text to continue, found none; give --prompt TEXT, or pipe a text in", run(RUN)[2])


def test_runs_that_cannot_generate_are_recognized(run, run_of_bytes):
    config = Path(run_of_bytes, "config.yaml")
    text = config.read_text()
    config.write_text(re.sub(r"data:\n.*?\ntrain:", "data: {target: 'mine:data'}\ntrain:", text, flags=re.DOTALL))
    assert re.search(r"trained on data of your own \(data\.target\); give --tokenizer FILE", run(RUN, *FOX)[2])
    config.write_text(text.replace("width: 8", "width: 16"))
    assert re.search(r"expected 'embed/\S+' of shape \[\d+, 16\], according to its config, found the shape", run(RUN, *FOX)[2])
    config_text = re.sub(r"model:\n.*?\nloss:", "model: {target: 'mine:model', seq_len: 8}\nloss:", text, flags=re.DOTALL)
    config.write_text(config_text)
    assert re.search(r"expected a built-in model, found 'mine:model' \(model\.target\)", run(RUN, *FOX)[2])


def test_a_diverged_model_is_reported(run, folder):
    arrays = load_file(folder / "model.safetensors")
    arrays["model.norm.weight"][0] = np.nan
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    code, out, err = run(str(folder), "--prompt", "w5")
    assert (code, out) == (2, "")
    assert "expected numbers as logits, found NaN after 1 token; the training of this model has diverged" in err


@pytest.mark.parametrize("name", ["embed_tokens", "layers.1.self_attn.v_proj"])
def test_numbers_that_are_no_floats_are_refused(run, folder, name):
    arrays = load_file(folder / "model.safetensors")
    arrays[f"model.{name}.weight"] = arrays[f"model.{name}.weight"].view(np.int32)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    code, out, err = run(str(folder), "--prompt", "w5")
    assert (code, out) == (2, "")
    assert re.search(r"^jpipe: generate: '.*llama': expected '.*' as in the model, float32\[.*\], found I32\[.*\]; download it again", err)


@pytest.mark.exhaustive
def test_a_tied_run_with_an_average_of_its_weights(run, tiny, monkeypatch, capsys):
    from jpipe_train.run import loop

    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    model = {"tied": True, "positions": "rope", "norm": "rms", "gated_mlp": True, "kv_heads": 1, "max_positions": 64}
    config = changed(tiny, model=model, optimizer={"ema_decay": 0.9, "learning_rate": 0.3}, checkpoint={"every": 5})
    place = str(loop.main(config).folder)
    capsys.readouterr()
    newest, averaged = (run(place, *FOX, "--weights", weights, "--tokens", "40") for weights in ("newest", "ema"))
    assert (newest[0], averaged[0]) == (0, 0)
    assert newest[1] != averaged[1]
    assert "moving average of the weights" in averaged[2]
    spread = run(place, *FOX, "--tokens", "40", "--devices", "3")
    assert spread[1] == newest[1]
    assert "3 devices" in spread[2]
