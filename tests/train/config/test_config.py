"""A config round-trips, overrides reach it, and its YAML is plain data."""

import itertools
import math
import re
import typing
from pathlib import Path

import pytest
import yaml

import jpipe
from jpipe import InputError, Plan
from jpipe_planner.machine.plain_yaml import parse
from jpipe_train.assemble.build import make_plan
from jpipe_train.config import config_file
from jpipe_train.config.config import Config, PlanConfig

GPT_BYTES = Path(__file__).parents[3] / "configs" / "gpt-bytes.yaml"


A_TAG = "config.yaml, line 1, column 7: this YAML cannot be read: expected a plain value, found a tag (!); correct the text"
AN_ANCHOR = "config.yaml, line 1, column 7: this YAML cannot be read: expected a plain value, found an anchor or alias (& or *);"
BILLION_LAUGHS = (
    "a: &a [x, x]\n" + "\n".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in itertools.pairwise("abcdefghij")) + "\nseed: *j"
)


@pytest.fixture
def write(tmp_path):
    """Write a YAML file and give its path."""

    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def test_written_arrays_are_read_back(write, tiny):
    config = Config.model_validate(tiny | {"plan": {"recompute": ["none", "full"], "num_stages": 2}})
    assert config_file.load(write(config_file.to_yaml(config))) == config


def test_keys_of_arguments_stay_the_numbers_they_are(write):
    content = {"model": {"target": "a:b", "arguments": {"sizes": {1: 0.5, "1": "one", 2.5: True}}}}
    written = config_file.to_yaml(Config.model_validate(content))
    assert config_file.load(write(written), allow_code=True).model.arguments == content["model"]["arguments"]


def test_the_shipped_config_names_every_key():
    content = yaml.safe_load(GPT_BYTES.read_text())
    assert config_file.load(GPT_BYTES).model_dump() == content


def test_the_small_llama_is_one():
    model = config_file.load(GPT_BYTES.with_name("llama-small.yaml")).model
    assert (model.positions, model.norm, model.activation, model.gated_mlp, model.heads // model.kv_heads_used) == (
        "rope", "rms", "silu", True, 2)  # fmt: skip


def test_the_options_of_a_plan_are_those_of_a_config_in_the_same_order():
    options = {name: field for name, field in Plan.model_fields.items() if not field.is_required()}
    config_fields = {name: field for name, field in PlanConfig.model_fields.items() if name in options}
    assert list(config_fields) == [
        name for name in options if name not in ("format", "ranks", "order", "order_limit", "placement", "predicted")
    ]
    types_of_config, types_of_plan = map(typing.get_type_hints, (PlanConfig, Plan))
    for name, field in config_fields.items():
        assert field.default == options[name].default
        if name in ("rules", "param_axes"):  # in a config a mapping like any other, in a plan one that cannot change
            continue
        assert types_of_config[name] == types_of_plan[name]
        assert set(map(repr, field.metadata)) <= set(map(repr, options[name].metadata))


def test_an_empty_file_is_all_defaults(write):
    assert config_file.load(write("# nothing\n")) == Config()


def test_overrides_replace_keys_and_their_values_are_yaml(write):
    overrides = ["train.steps=7", "optimizer.learning_rate=1e-3", "run.dir=null", "plan.recompute=[none, full]", "plan.vertical_sync=true"]
    config = config_file.load(write("run: {dir: somewhere}\ntrain:\n"), overrides)
    assert config.train.steps == 7
    assert config.optimizer.learning_rate == 0.001
    assert config.run.dir is None
    assert config.plan.recompute == ["none", "full"]
    assert config.plan.vertical_sync is True


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.0e-3", "1.e-3", "0.001", "+1e-3", ".001", "+.1e-2", "1_0.0e-4"])
def test_every_spelling_of_a_number_is_one(number):
    assert parse(number, "here") == 0.001


@pytest.mark.parametrize(
    "word", ["010", "08", "00", "-010", "0o10", "1:30", "1:30.5", "2001-01-01", "2001-1-1T10:00:00", "yes", "No", "ON", "off", "<<", "="]
)
def test_an_ambiguous_yaml_word_is_refused_without_quotes(word):
    message = f"here, line 1, column 5: this YAML cannot be read: '{word}' can be read in two ways; write true, false or a plain"
    with pytest.raises(InputError, match=re.escape(message)):
        parse(f"[1, {word}]", "here")
    assert parse(f"[1, '{word}']", "here") == [1, word]


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1" + "0" * 400 + ".0", str(2**64), "0x" + "f" * 17, "9" * 5000, "0b_"])
def test_a_number_beyond_64_bits_is_refused(text):
    with pytest.raises(InputError, match=r"here, line 1, column 1: .* expected a number of at most 64 bits"):
        parse(text, "here")


@pytest.mark.parametrize("number", [math.inf, -math.inf, 2**64 - 1, 1 - 2**64, 1e308])
def test_numbers_up_to_64_bits_are_read(number):
    assert parse(yaml.safe_dump(number).splitlines()[0], "here") == number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 3\nseed: 1", "config.yaml, line 2, column 5: this YAML cannot be read: expected ',' or '}', but got ':'"),
        ("seed: 1\nseed: 2", "config.yaml, line 2, column 1: this YAML cannot be read: the key 'seed' occurs twice"),
        (
            "optimizer:\n  lr_arguments: {0x1: 1, 1: 2}",
            "config.yaml, line 2, column 26: this YAML cannot be read: the key '1' occurs twice",
        ),
        ("seed: 1\nplan: \x07x", "config.yaml, line 2, column 7: this YAML cannot be read: found character #x07; correct the text"),
        (
            "seed: 1\n---\nseed: 2",
            "config.yaml, line 2, column 1: this YAML cannot be read: expected a single document in the stream, but found another",
        ),
        ("[" * 51 + "]" * 51, "config.yaml, line 1, column 51: this YAML cannot be read: nested too deeply"),
        ("train.steps: 3", "config.yaml: unknown key 'train.steps'; write 'steps' inside of 'train', without the dot"),
        ("schedul: gpipe", "config.yaml: unknown key 'schedul'; did you mean 'plan.schedule'?"),
        ("train: {Steps: 3}", "config.yaml: unknown key 'train.Steps'; did you mean 'train.steps'?"),
        ("train: {path: 3}", "config.yaml: unknown key 'train.path'; did you mean 'data.path'?"),
        (
            "train: {xyz: 3}",
            "config.yaml: unknown key 'train.xyz'; known: batch_size, epochs, eval_batches, eval_every, log_every, profile, steps, stop",
        ),
        ('train: {"\\e[31msteps\\n": 3}', "config.yaml: unknown key 'train.\\x1b[31msteps\\n'; did you mean 'train.steps'?"),
        ("format: jpipe-plan/1", "config.yaml: expected a config, found a plan; name it as plan.file in a config, or show it with"),
        ("train:\n\tsteps: 3", "config.yaml, line 2, column 1: this YAML cannot be read: found character '\\t'"),
        ("seed: !!python/object/apply:os.getcwd []", A_TAG),
        ("seed: !!bool foo", A_TAG),
        ("seed: !!timestamp foo", A_TAG),
        ('seed: !!int ""', A_TAG),
        ("seed: ! 1", A_TAG),
        ("seed: &a 1", AN_ANCHOR),
        ("seed: *a", AN_ANCHOR),
        (
            BILLION_LAUGHS,
            "config.yaml, line 1, column 4: this YAML cannot be read: expected a plain value, found an anchor or alias",
        ),
        (
            "train:\n  steps: 2001-99-99",
            "config.yaml, line 2, column 10: this YAML cannot be read: '2001-99-99' can be read in two ways;",
        ),
        ("[" * 5000, "nested too deeply"),
        ("- seed", "config.yaml: expected a mapping of keys such as 'train:', found list"),
        ("train: 3", "config.yaml: train: expected a valid dictionary or instance of TrainConfig, found 3"),
        (
            "train: {stop: {patience: 1, metric: loss}}",
            "config.yaml: train.stop.metric: expected the name of a result of the validations, val_loss or val_NAME, found 'loss'; did you "
            "mean 'val_loss'?",
        ),
        ("checkpoint: {best: {metric: val_}}", "config.yaml: checkpoint.best.metric: expected the name of a result of the validations"),
        ("train: {steps: 0}", "config.yaml: train.steps: expected greater than or equal to 1, found 0"),
        ("train: {steps: true}", "config.yaml: train.steps: expected a valid integer, found True"),
        ("optimizer: {learning_rate: .nan}", "config.yaml: optimizer.learning_rate: expected a finite number, found nan"),
        ("model: {heads: 3}", "config.yaml: model: width 128 is not divisible by heads 3; change one of them"),
        ("plan: {recompute: 3}", "config.yaml: plan.recompute: expected a policy's name or a list of names, one for each stage, found 3"),
        ("seed: null", "config.yaml: seed: expected a valid integer, found None"),
        (f"seed: 0x{'f' * 5000}", "config.yaml, line 1, column 7: this YAML cannot be read: expected a number of at most 64 bits"),
        (f"seed: {'f' * 5000}", "config.yaml: seed: expected a valid integer, found 'fff"),
        ("optimizer: {warmup_steps: 10000000000}", "optimizer.warmup_steps: expected less than or equal to 1000000000, found 10000000000"),
        ("model: {width: 4000000}", "config.yaml: model.width: expected less than or equal to 1000000, found 4000000"),
        ("model: {seq_len: 1000000000}", "config.yaml: model: width 128 × seq_len 1000000000 makes a table of positions of more than"),
        ("model: {depth: 1001}", "config.yaml: model.depth: expected less than or equal to 1000, found 1001"),
        ("plan: {microbatches: 4000}", "config.yaml: plan.microbatches: expected less than or equal to 1024, found 4000"),
        ("plan: {extra_in_flight: 65}", "config.yaml: plan.extra_in_flight: expected less than or equal to 64, found 65"),
        *(
            (f'{{{section}: {{{key}: "\\ud800"}}}}', f"config.yaml: {section}.{key}: unknown {what} '\\ud800'; known: ")
            for section, key, what in [
                ("plan", "schedule", "schedule"),
                ("plan", "recompute", "recomputation policy"),
                ("optimizer", "name", "optimizer"),
                ("optimizer", "lr_schedule", "learning-rate schedule"),
            ]
        ),
        ("eval: {metrics: {loss: accuracy}}", "eval.metrics: expected a name of letters, digits and _, other than 'loss', found 'loss'"),
        ("eval: {metrics: {a b: accuracy}}", "eval.metrics: expected a name of letters, digits and _, other than 'loss', found 'a b'"),
        (
            "eval: {metrics: {top5: top3}}",
            "eval.metrics: 'top5': expected module:function or one of accuracy, top5, cross_entropy, f1_binary, f1_macro, squared_error",
        ),
        ("eval: {metrics: {top5: 'a:b'}}", "found functions to import and run: 'a:b' (eval.metrics.top5); read their code"),
        ("optimizer: {name: adamm}", "config.yaml: optimizer.name: unknown optimizer 'adamm'; did you mean 'adam'?"),
    ],
)
def test_a_mistake_in_the_file_is_reported_with_its_place(write, text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        config_file.load(write(text))


@pytest.mark.parametrize("key", ["run.dir", "data.path", "plan.file"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("~nosuchuser/x", "'~nosuchuser/x' begins with an unknown user's home folder; give the full path"),
        ('"a\\0b"', "'a\\x00b' has a character that no path can have; choose another name"),
        ('"a\\ud800b"', "expected a valid string, unable to parse raw data as a unicode string, found 'a\\ud800b'"),
        ('""', "expected String should have at least 1 character, found ''"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused(write, key, path, message):
    section, name = key.split(".")
    with pytest.raises(InputError) as caught:
        config_file.load(write(f"{section}: {{{name}: {path}}}"))
    assert str(caught.value).endswith(f"config.yaml: {key}: {message}")


@pytest.mark.parametrize("section", ["run", "data", "train", "eval", "model", "loss", "plan", "optimizer"])
def test_an_empty_section_is_its_defaults(write, section):
    assert config_file.load(write(f"{section}:\n")) == config_file.load(write(""), [f"{section}=null"]) == Config()


def test_all_mistakes_are_reported_at_once(write):
    with pytest.raises(InputError, match=r"train\.step.*\n.*model\.depth"):
        config_file.load(write("train: {step: 3}\nmodel: {depth: x}"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "--set train.steps: expected key=value, such as train.steps=100, found no '='"),
        ("=3", "--set =3: expected key=value, such as train.steps=100, found an empty name"),
        ("schedule=gpipe", "config.yaml --set schedule=gpipe: unknown key 'schedule'; did you mean 'plan.schedule'?"),
        ("TRAIN.steps=3", "config.yaml --set TRAIN.steps=3: unknown key 'TRAIN'; did you mean 'train'?"),
        ("optimizer.arguments..b2=3", "--set optimizer.arguments..b2=3: expected key=value, such as train.steps=100, found an empty name"),
        ("train.step=3", "config.yaml --set train.step=3: unknown key 'train.step'; did you mean 'train.steps'?"),
        ("trian.steps=3", "config.yaml --set trian.steps=3: unknown key 'trian'; did you mean 'train'?"),
        ("seed.x=3", "config.yaml --set seed.x=3: seed: expected a valid integer, found {'x': 3}"),
        ("log=[wanbd]", "config.yaml --set log=[wanbd]: log: unknown log 'wanbd'; did you mean 'wandb'?"),
        ("data.path=*.txt", "--set data.path=*.txt, line 1, column 2: this YAML cannot be read"),
    ],
)
def test_a_mistake_in_an_override_is_reported_with_the_override(write, override, message):
    with pytest.raises(InputError, match=re.escape(message)):
        config_file.load(write(""), [override])


@pytest.mark.parametrize("key", ["seed", "plan.recompute"])
def test_a_value_in_place_of_a_section(write, key):
    message = f"--set {key}.0=full: '{key}' is a value, not a section; set the whole value, as {key}=…"
    with pytest.raises(InputError, match=re.escape(message)):
        config_file.load(write("seed: 1\nplan: {recompute: [none, none]}"), [f"{key}.0=full"])


@pytest.mark.parametrize("second", ["train.steps=3", "train={}"])
def test_an_override_that_undoes_another_is_refused(write, second):
    message = f"--set {second}: expected each key once, found --set train.steps=… before, which would be lost; keep one"
    with pytest.raises(InputError, match=re.escape(message)):
        config_file.load(write(""), ["train.steps=2", second])


def test_an_override_may_refine_another(write):
    overrides = ["train={log_every: 2}", "train.steps=3", "train.batch_size=8", "optimizer.arguments.b2=0.5", "optimizer.arguments.b1=0.5"]
    config = config_file.load(write("train: {eval_every: 7}"), overrides)
    assert config.train.model_dump() == Config().train.model_dump() | {"log_every": 2, "steps": 3, "batch_size": 8}
    assert config.optimizer.arguments == {"b1": 0.5, "b2": 0.5}


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary.yaml: expected YAML text in UTF-8"):
        config_file.load(tmp_path / "binary.yaml")
    with pytest.raises(InputError, match="cannot read the config: Is a directory"):
        config_file.load(tmp_path)


LAYERS = ("embed", "block_0", "block_1", "block_2", "block_3", "head")


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ([], [2, 1, 1, 2]),
        (["plan.num_stages=3", "plan.recompute=[full, none, full]"], [2, 2, 2]),
        (["plan.num_stages=2"], [3, 3]),
        (["plan.num_stages=1"], [6]),
        (["plan.layer_costs={}"], [2, 2, 1, 1]),
        (["plan.layer_costs={embed: 5}", "plan.num_stages=2"], [1, 5]),
        (["plan.layer_costs={block_1: 4, block_2: 4}"], [2, 1, 1, 2]),
    ],
)
def test_stages_are_cut_to_cost_alike(overrides, sizes):
    config = config_file.load(GPT_BYTES, overrides).plan
    plan = make_plan(config, LAYERS)
    assert plan.layers == LAYERS
    assert sum(sizes) == len(LAYERS)
    assert [len(stage.layers) for stage in plan.stages] == sizes
    assert [stage.recompute for stage in plan.stages] == (config.recompute if isinstance(config.recompute, list) else ["auto"] * len(sizes))


def test_the_costs_of_layers_that_are_not_there_are_refused():
    with pytest.raises(InputError, match=r"^plan\.layer_costs: layer 'hed' is not in the model; did you mean 'head'\?$"):
        make_plan(config_file.load(GPT_BYTES, ["plan.layer_costs={hed: 1}"]).plan, LAYERS)
    with pytest.raises(InputError, match=r"plan\.layer_costs\.head: expected greater than or equal to 0, found -1"):
        config_file.load(GPT_BYTES, ["plan.layer_costs={head: -1}"])


def test_the_schedule_that_is_used_where_none_is_named_flushes():
    names = (PlanConfig().schedule, jpipe.Plan.even("abcd", 2).schedule, jpipe.Plan.even("abcd", 2, microbatches=8).schedule)
    assert set(names) == {"pipedream_flush"}
    assert jpipe.schedules.SCHEDULES[names[0]].flushes
    assert jpipe.Plan.even("abcd", 2).microbatches == PlanConfig().microbatches


def test_arrays_with_the_default_keys_of_text_are_read_and_other_values_are_refused():
    """As `config.yaml` of a run of version 0.4 has it, with the keys of every format."""
    own = {"format": "arrays", "path": "rows.csv"}
    text = {"tokenizer": None, "prompt_key": "prompt", "chat_template": None, "too_long": "refuse", "end_of_text": "auto"}
    config = {"model": {"target": "my_model:net"}, "loss": {"name": "squared_error"}}
    data = Config.model_validate(config | {"data": text | own}).data
    assert {name: getattr(data, name) for name in own} == own
    assert not text.keys() & data.model_dump().keys()
    with pytest.raises(ValueError, match="prompt_key has no effect with format arrays"):
        Config.model_validate(config | {"data": text | own | {"prompt_key": "question"}})
