"""A user's models, losses and data in a config: they run only if allowed, and every mistake is reported in one line."""

import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

import jpipe
from jpipe.model._function_arguments import call_with_randomness, random_parameter
from jpipe_train import cli
from jpipe_train.assemble import build, model
from jpipe_train.assemble.metrics import metrics
from jpipe_train.config import config_file
from jpipe_train.config.config import Config, EvalConfig
from jpipe_train.config.functions import entry_point
from tests.train.run.test_loop import rows_of

OWN_PARTS = '''
"""What a user may write."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import jpipe

LAYERS = {"first": lambda rngs: nnx.Linear(2, 4, rngs=rngs), "last": lambda rngs: nnx.Linear(4, 1, rngs=rngs)}


def model(scale=1.0):
    return jpipe.LayerStack(LAYERS | {"scale": lambda x: scale * x})


def needs_width(width):
    return model()


def wrong(kind):
    return {
        "dict": LAYERS,
        "none": None,
        "class": nnx.Linear,
        "list": [1],
    }[kind]


class Net(nnx.Module):
    """A whole model."""

    def __init__(self, width=4, *, rngs):
        self.first, self.last = nnx.Linear(2, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jnp.tanh(self.first(x))))


def whole(kind, width=4):
    return {
        "built": lambda: Net(width, rngs=nnx.Rngs(0)),
        "abstract": lambda: nnx.eval_shape(lambda: Net(width, rngs=nnx.Rngs(0))),
        "constructor": lambda: lambda rngs: Net(width, rngs=rngs),
        "linen": lambda: linen.Sequential([linen.Dense(width), jnp.tanh, linen.Dense(1)]),
    }[kind]()


def one_layer():
    return linen.Dense(1, use_bias=False)


def no_module():
    return lambda x: jnp.tanh(x)


def fails():
    return helper()


def helper():
    raise KeyError("no such thing\\nand more")


def fails_inside():
    return jnp.ones(2) @ jnp.ones(3)


def leaves():
    raise SystemExit(5)


def repeats():
    return jpipe.LayerStack({})


def no_stack():
    return jpipe.LayerStack(3)


@jax.jit
def loss(outputs, labels, power=2):
    return (jnp.abs(outputs - labels) ** power).sum(), jnp.asarray(float(labels.size))


class Batches:
    def __init__(self, seed, batch_size):
        self.seed, self.batch_size = seed, batch_size

    def __len__(self):
        return 2

    def __getitem__(self, t):
        x = np.random.default_rng((self.seed, t)).normal(size=(self.batch_size, 2)).astype(np.float32)
        return x, x[:, :1] - x[:, 1:]


def data(seed, batch_size):
    return Batches(seed + 1, batch_size), Batches(0, batch_size)


class Few(Batches):
    def __getitem__(self, t):
        return super().__getitem__([0, 1, 2][t])


class Endless(Few):
    def __len__(self):
        return 1000


def few(seed, batch_size):
    return Endless(seed, batch_size), Batches(0, batch_size)


def fewer(seed, batch_size):
    return Few(seed, batch_size), Batches(0, batch_size)


def numbered(seed, batch_size):
    batches = Batches(seed, batch_size)
    return {t: batches[0] for t in range(41) if t != 3}, batches


def odd_data(seed, batch_size, kind):
    good = [Batches(0, batch_size)[0]]
    return {
        "none": None,
        "three": (good, good, good),
        "number": (3, good),
        "generator": ((batch for batch in good), good),
        "empty": (good, []),
        "few": (good * 3, good),
        "lists": ([[1, 2]] * 40, good),
        "jax": ([(jnp.ones((batch_size, 2)), jnp.ones((batch_size, 1)))] * 40, good),
        "rows": ([Batches(0, 3)[0]] * 40, good),
    }[kind]


def classes(count=3):
    return jpipe.LayerStack({"scale": lambda x: 2.0 * x, "last": lambda rngs: nnx.Linear(2, count, rngs=rngs)})


class Labelled(Batches):
    def __init__(self, *sizes, wrong=None, label=7):
        super().__init__(*sizes)
        self.wrong, self.label = wrong, label

    def __getitem__(self, t):
        labels = np.zeros(self.batch_size, np.int32)
        labels[-1] = self.label if t == self.wrong else 2
        return super().__getitem__(t)[0], labels


def labelled(seed, batch_size, train=None, validation=None, label=7):
    return Labelled(1, batch_size, wrong=train, label=label), Labelled(0, batch_size, wrong=validation, label=label)


def tokens(seed, batch_size):
    x = np.full((batch_size, 8), 256, np.int32)
    return [(x, x % 256)] * 40, [(x, x % 256)]


class Negative(Batches):
    def __len__(self):
        return -1


def negative(seed, batch_size):
    return Batches(seed, batch_size), Negative(0, batch_size)


class Halt(BaseException):
    pass


def halts():
    raise Halt("enough")


limit = 3
'''


@pytest.fixture(autouse=True)
def folder_of_own_parts(tmp_path, monkeypatch):
    """Change to a folder with the modules `own_parts` and `broken_…`."""
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    (tmp_path / "broken_name.py").write_text("import os\n\nx = unknown\n")
    (tmp_path / "broken_syntax.py").write_text("import os\ndef f(:\n")
    (tmp_path / "broken_import.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "broken_exit.py").write_text("import sys\nsys.exit(7)\n")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("own_parts", "leaves_a_trace"):
        sys.modules.pop(name, None)


CONFIG = {
    "model": {"target": "own_parts:model"},
    "loss": {"target": "own_parts:loss"},
    "data": {"target": "own_parts:data"},
    "train": {"steps": 40, "batch_size": 8, "eval_every": 20},
    "plan": {"schedule": "gpipe", "num_stages": 2, "microbatches": 2},
    "optimizer": {"learning_rate": 0.05},
    "run": {"dir": "run"},
}


def line_of(code: str) -> str:
    """Return the place of this code in the user's file, as `file:line`."""
    return f"{Path.cwd()}/own_parts.py:{OWN_PARTS[: OWN_PARTS.index(code)].count(chr(10)) + 1}"


def of_model(target: str, arguments=None) -> Config:
    """Return the config of a run with a model of the user's, in batches of eight rows."""
    return Config.model_validate({"model": {"target": target, "arguments": arguments}, "train": {"batch_size": 8}})


def run(capsys, *flags: str, **sections) -> tuple[int, str, str]:
    """Run `jpipe train` with the config, with some sections replaced, and return (exit code, stdout, stderr)."""
    Path("own.yaml").write_text(yaml.safe_dump(CONFIG | sections))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        code = cli.main(["train", "own.yaml", *flags])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_model_loss_and_data_can_all_be_the_users(capsys):
    code, out, err = run(capsys, "--allow-code")
    assert (code, err) == (0, "")
    assert "data: own_parts:data; plan: 2 stages, gpipe" in out
    assert "samples/s" in out
    assert "tokens" not in out
    before, after = map(float, re.search(r"validation loss (\S+) → (\S+); the run is in run; open its report.html\n$", out).groups())
    assert after < 0.2 * before
    assert str(Path.cwd()) not in sys.path


@pytest.mark.usefixtures("no_report")
@pytest.mark.exhaustive
def test_a_whole_model_is_trained_planned_simulated_and_exported(capsys):
    sections = {"model": {"target": "own_parts:Net", "arguments": {"width": 8}}}
    code, _, err = run(capsys, "--allow-code", **sections)
    assert (code, err) == (0, "")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert cli.main(["plan", "own.yaml", "--allow-code", "--devices", "2", "--out", "plan.json"]) == 0
        assert {layer for stage in yaml.safe_load(Path("plan.json").read_text())["stages"] for layer in stage["layers"]} == {
            "first",
            "last",
        }
        assert cli.main(["simulate", "own.yaml", "--allow-code"]) == 0
        assert cli.main(["export", "run", "--out", "weights.safetensors"]) == 0
    assert "first/kernel" in capsys.readouterr().out + Path("weights.safetensors").read_bytes()[:500].decode("latin1")
    assert cli.main(["export", "run", "--out", "whole", "--layout", "model"]) == 0
    tree = ocp.StandardCheckpointer().restore(Path("whole").resolve())
    assert tree.keys() == {"first", "last"}
    assert tree["first"].keys() == {"kernel", "bias"}
    losses = rows_of(Path("run"))
    code, _, err = run(
        capsys, "--allow-code", **sections, plan={"schedule": "gpipe", "num_stages": 1, "microbatches": 2}, run={"dir": "one"}
    )
    assert (code, err) == (0, "")
    assert [row["loss"] for row in rows_of(Path("one"))] == pytest.approx([row["loss"] for row in losses], rel=1e-5)


@pytest.mark.usefixtures("no_report")
@pytest.mark.slow
def test_a_run_with_a_users_model_repeats_from_its_folder(capsys):
    assert run(capsys, "--allow-code")[0] == 0
    Path("run").rename("before")
    resolved = yaml.safe_load(Path("before/config.yaml").read_text())
    assert resolved["model"] == {"target": "own_parts:model", "arguments": {}}
    assert cli.main(["train", "before/config.yaml"]) == 2
    assert "--allow-code" in capsys.readouterr().err
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert cli.main(["train", "before/config.yaml", "--allow-code"]) == 0
    assert rows_of(Path("before")) == rows_of(Path("run"))


@pytest.mark.parametrize(
    ("section", "target"),
    [("model", "os:system"), ("data", "leaves_a_trace:f"), ("loss", "leaves_a_trace:f"), ("optimizer", "leaves_a_trace:f")],
)
def test_a_config_alone_runs_no_code(capsys, section, target):
    Path("leaves_a_trace.py").write_text("open('trace', 'w')\ndef f(*_, **__): pass\n")
    key = "name" if section == "optimizer" else "target"
    code, _, err = run(capsys, **({name: {} for name in ("model", "data", "loss")} | {section: {key: target}}))
    assert code == 2
    assert err == (
        f"jpipe: own.yaml: expected built-in parts only, found functions to import and run: '{target}' ({section}.{key}); "
        "read their code, and if you trust it add --allow-code\n"
    )
    assert not Path("trace").exists()
    assert "leaves_a_trace" not in sys.modules
    assert sorted(path.name for path in Path().iterdir() if path.is_dir()) == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("os:system", "expected a function of your own, found 'os:system' of Python's standard library"),
        ("builtins:exec", "expected a function of your own, found 'builtins:exec' of Python's standard library"),
        ("subprocess:run", "expected a function of your own, found 'subprocess:run' of Python's standard library"),
        (
            "numpy:array",
            "expected a function or class written in Python, found 'numpy:array', a builtin_function_or_method; name a function",
        ),
        ("jpipe_train:model", "but 'jpipe_train' is a package of jpipe; rename your module"),
        ("jpipe.x:y", "'jpipe' is a package of jpipe; rename"),
        ("own_parts:limit", "expected a function or class written in Python, found 'own_parts:limit', a int; name a function"),
        ("own_parts:modle", "the module 'own_parts' has no function 'modle'; did you mean 'model'?"),
        ("own_part:model", "the module 'own_part' of 'own_part:model' is neither in the current folder "),
        ("own_parts.deeper:model", "the module 'own_parts.deeper' of"),
        (
            "broken_name:f",
            "the module 'broken_name' fails when it is imported: NameError: name 'unknown' is not defined (HERE/broken_name.py:3)",
        ),
        ("broken_syntax:f", "the module 'broken_syntax' fails when it is imported: SyntaxError: invalid syntax (broken_syntax.py, line 2)"),
        ("broken_import:f", "ModuleNotFoundError: No module named 'nowhere_to_be_found' (HERE/broken_import.py:1)"),
        ("broken_exit:f", "the module 'broken_exit' fails when it is imported: SystemExit: 7 (HERE/broken_exit.py:2)"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_reported(target, message):
    for _ in range(2):  # a module that failed fails again
        with pytest.raises(jpipe.InputError) as caught:
            entry_point.load(target, "model.target")
        assert str(caught.value).startswith("model.target: ")
        assert message.replace("HERE", str(Path.cwd())) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert str(Path.cwd()) not in sys.path


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("model", {"scal": 2}, "model.arguments: 'own_parts:model' has no argument 'scal'; its arguments, the most similar first: scale"),
        ("fails", {"x": 2}, "model.arguments: 'own_parts:fails' has no argument 'x'; it takes none"),
        ("needs_width", {}, "model.arguments: 'own_parts:needs_width' needs the argument 'width'; add it"),
        (
            "wrong",
            {"kind": "dict"},
            "return a model or a jpipe.LayerStack, found a dict with keys first, last; wrap it in jpipe.LayerStack(…)",
        ),
        ("wrong", {"kind": "none"}, "found None; end the function with return"),
        ("wrong", {"kind": "class"}, "found the class Linear; return an instance of it, or name the class itself as model.target"),
        ("wrong", {"kind": "list"}, "found list; return jpipe.LayerStack("),
        ("fails", {}, "model.target: 'own_parts:fails' fails: KeyError: 'no such thing\\nand more' (LINE); fix it there"),
        ("fails_inside", {}, "(LINE); fix it there"),
        ("leaves", {}, "model.target: 'own_parts:leaves' fails: SystemExit: 5 (LINE); fix it there"),
        ("halts", {}, "model.target: 'own_parts:halts' fails: Halt: enough (LINE); fix it there"),
        ("repeats", {}, "LayerStack: expected at least one layer, found none"),
    ],
)
def test_a_mistake_in_a_model_is_reported(name, arguments, message):
    with pytest.raises(jpipe.InputError) as caught:
        model.layers(of_model(f"own_parts:{name}", arguments))
    line = {"fails": "raise KeyError", "fails_inside": "return jnp.ones", "leaves": "raise SystemExit", "halts": "raise Halt"}.get(name)
    assert (message.replace("LINE", line_of(line)) if line else message) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "arguments", "ids"),
    [
        ("Net", {"width": 8}, ("first", "last")),
        ("whole", {"kind": "built"}, ("first", "last")),
        ("whole", {"kind": "abstract"}, ("first", "last")),
        ("whole", {"kind": "constructor"}, ("first", "last")),
        ("whole", {"kind": "linen", "width": 8}, ("layers_0", "layers_2")),
    ],
)
def test_a_target_may_be_a_whole_model(target, arguments, ids):
    config = of_model(f"own_parts:{target}", arguments)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        stack = model.layers(config, lambda: np.zeros((8, 2), np.float32))
        widths = [spec.output.shape[-1] for spec in stack.specs(jax.ShapeDtypeStruct((4, 2), np.float32)).values()]
    assert stack.ids == ids
    assert widths == [arguments.get("width", 4), 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_layer", "expected a model of several modules with parameters"),
        ("no_module", "expected an NNX module or its constructor .* found function"),
    ],
)
def test_a_model_that_cannot_be_cut_is_reported_with_the_key_that_names_it(name, message):
    config = of_model(f"own_parts:{name}")
    with pytest.raises(jpipe.InputError, match=f"^model.target: {message}"), build.errors_name_config_keys(None):
        model.layers(config, lambda: np.zeros((8, 2), np.float32))


def test_the_arguments_of_a_whole_model_are_checked():
    for arguments, message in (
        ({"widht": 8}, "has no argument 'widht'; its arguments, the most similar first: width"),
        ({"rngs": 1}, "is given by jpipe"),
    ):
        with pytest.raises(jpipe.InputError, match=message):
            model.layers(of_model("own_parts:Net", arguments), lambda: np.zeros((8, 2), np.float32))


def test_a_loss_takes_its_arguments():
    outputs, labels = np.full((2, 1), 3.0, np.float32), np.zeros((2, 1), np.float32)
    for arguments, total in (({}, 18), ({"power": 1}, 6)):
        loss = model.loss(Config(loss={"target": "own_parts:loss", "arguments": arguments}))
        with jax.numpy_dtype_promotion("standard"):
            assert tuple(map(float, loss(outputs, labels))) == (total, 2)
    with pytest.raises(jpipe.InputError, match=r"loss\.arguments: 'own_parts:loss' has no argument 'powr'; .* first: power"):
        model.loss(Config(loss={"target": "own_parts:loss", "arguments": {"powr": 1}}))
    with pytest.raises(jpipe.InputError, match=r"loss\.arguments: 'labels' of 'own_parts:loss' is given by jpipe"):
        model.loss(Config(loss={"target": "own_parts:loss", "arguments": {"labels": 1}}))


def test_a_loss_and_a_metric_may_take_a_random_key():
    key, (x, y) = jax.random.key(3), np.ones((2, 2, 1), np.float32)
    loss = model.loss(Config(loss={"target": "tests.train.metrics:drawn", "arguments": {"scale": 2.0}}))
    metric = metrics(EvalConfig(metrics={"drawn": "tests.train.metrics:drawn"}))["drawn"]
    assert (random_parameter(loss), random_parameter(metric)) == ("key", "key")
    draws = [float(call_with_randomness(function, x, y, key)[0]) for function in (loss, metric)]
    assert draws[0] == 2 * draws[1] == 2 * float(jax.random.uniform(key))
    with pytest.raises(jpipe.InputError, match=r"loss\.arguments: 'key' of 'tests.train.metrics:drawn' is given by jpipe; remove it here"):
        model.loss(Config(loss={"target": "tests.train.metrics:drawn", "arguments": {"key": 1}}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "expected 'own_parts:odd_data' to return (train, validation), found NoneType; return a pair: training"),
        ("three", "to return (train, validation), found tuple of length 3; return a pair: training"),
        ("number", "expected the train batches of 'own_parts:odd_data' to be indexable, train[t], found int; return a list"),
        ("generator", "to be indexable, train[t], found generator; return a list"),
        ("empty", "expected at least one validation batch from 'own_parts:odd_data', found none"),
        (
            "few",
            "expected train to have batch t for every t < train.steps 40, found a list of 3 batches; repeat them, or lower train.steps",
        ),
        ("lists", "expected train[0] to be (inputs, labels), arrays or trees of arrays with 8 rows, found a list; return a tuple of two"),
        ("rows", "with 8 rows, found the shapes [3, 2], [3, 1]; fix them"),
    ],
)
def test_invalid_data_is_refused(capsys, kind, message):
    code, _, err = run(capsys, "--allow-code", data={"target": "own_parts:odd_data", "arguments": {"kind": kind}})
    assert code == 2
    assert err.startswith("jpipe: data.target: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("run").exists()


def test_data_that_runs_out_is_reported_with_the_step(capsys):
    code, _, err = run(capsys, "--allow-code", data={"target": "own_parts:few"})
    assert code == 2
    assert err == f"jpipe: data.target: train[3] fails: IndexError: list index out of range ({line_of('return super()')}); fix it there\n"
    shutil.rmtree("run")
    code, _, err = run(capsys, "--allow-code", data={"target": "own_parts:fewer"})
    expected = "expected train to have batch t for every t < train.steps 40, found a Few of 2 batches; repeat them, or lower train.steps"
    assert (code, err) == (2, f"jpipe: data.target: {expected}\n")


@pytest.mark.parametrize(
    ("arguments", "description"),
    [
        ({"train": 0}, "7 in train[0]"),
        ({"train": 2, "label": 3}, "3 in train[2]"),
        ({"validation": 0, "label": 4}, "4 in validation[0]"),
    ],
)
def test_labels_out_of_range_are_reported_with_their_batch(capsys, arguments, description):
    data = {"target": "own_parts:labelled", "arguments": arguments}
    code, _, err = run(capsys, "--allow-code", model={"target": "own_parts:classes"}, loss={}, data=data)
    assert (code, err) == (
        2,
        f"jpipe: data: expected every label to be at most 2 (the model has 3 outputs for each), found {description}; "
        "correct the labels, or the model\n",
    )
    assert Path("run").exists() == (description[-2] != "0")  # where the first batches are wrong, nothing is begun


def test_tokens_beyond_the_built_in_vocabulary_are_reported(capsys):
    small = {"depth": 1, "width": 8, "heads": 1, "seq_len": 8}
    code, _, err = run(capsys, "--allow-code", model=small, loss={}, data={"target": "own_parts:tokens"})
    message = (
        "data: expected every input to be from 0 to 255 (the built-in model has 256 symbols, model.vocab_size), found 256 in "
        "validation[0]; "
    )
    assert (code, err) == (2, f"jpipe: {message}correct the inputs, or the model\n")


def test_an_invalid_length_is_reported(capsys):
    code, _, err = run(capsys, "--allow-code", data={"target": "own_parts:negative"})
    assert (code, err) == (2, "jpipe: data.target: len(validation) fails: ValueError: __len__() should return >= 0; fix it\n")


def test_no_line_of_jpipe_is_named_as_the_users(capsys):
    code, _, err = run(capsys, "--allow-code", data={"target": "own_parts:numbered"})
    assert (code, err) == (2, "jpipe: data.target: train[3] fails: KeyError: 3; fix it\n")
    with pytest.raises(jpipe.InputError, match=re.escape(f"({line_of('return jpipe.LayerStack(3)')}); fix it there")):
        entry_point.call("own_parts:no_stack", "model.target", {})


def test_layers_that_do_not_fit_are_reported(capsys):
    code, _, err = run(capsys, "--allow-code", loss={}, model={"target": "own_parts:model"})
    assert code == 2
    assert re.match(
        r"jpipe: loss: the function does not take outputs float32\[4, 1\] of layer 'scale' and labels float32\[4, 1\]; it raises ", err
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"target": "a:b", "depth": 2, "width": 8}},
            "model: depth, width have no effect with 'a:b'; remove them, or move them below",
        ),
        ({"data": {"target": "a:b", "path": "x"}}, "data: path has no effect with 'a:b'"),
        ({"model": {"target": "a:b", "seq_len": 8}, "data": {"target": "a:b"}}, "model.seq_len has no effect with model.target and"),
        ({"model": {"arguments": {"x": 1}}}, "model: arguments has no effect without target; set target to module:function"),
        (
            {"model": {"target": "a.b"}},
            "model.target: expected module:function, such as my_models:conv_net, found 'a.b'",
        ),
        ({"model": {"target": "a:b; import os"}}, "model.target: expected module:function, such as my_models:conv_net, found 'a:b; import"),
        ({"loss": {"target": ":b"}}, "loss.target: expected module:function"),
        ({"model": {"target": "a:b", "arguments": [1]}}, "model.arguments: expected a valid dictionary, found [1]"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(sections, message):
    Path("own.yaml").write_text(yaml.safe_dump(sections))
    with pytest.raises(jpipe.InputError, match=re.escape(message)):
        config_file.load("own.yaml", allow_code=True)


def test_a_users_model_may_read_the_built_in_text():
    config = Config.model_validate({"model": {"target": "a:b", "seq_len": 32, "arguments": {"n": 1}}})
    Path("own.yaml").write_text(config_file.to_yaml(config))
    reloaded = config_file.load("own.yaml", allow_code=True)
    assert reloaded == config
    assert reloaded.model.seq_len == 32
