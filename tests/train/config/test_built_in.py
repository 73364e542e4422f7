"""Built-in models, data and losses that a config names as a target."""

import pytest
from jpipe_train.config import config_file
from jpipe_train.config.built_in import DATA, LOSSES, MODELS
from jpipe_train.config.config import Config
from jpipe_train.data import data
from pydantic import ValidationError

import jpipe


@pytest.mark.parametrize("part", [*MODELS.values(), *DATA.values(), *LOSSES.values()], ids=lambda part: part.function)
def test_each_is_there(part):
    assert callable(part.load())


def test_it_needs_no_permission_and_comes_back_as_it_was(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {target: gnmt, arguments: {depth: 4}}\ndata: {target: words, arguments: {folder: there}}\n"
    )
    config = config_file.load(tmp_path / "config.yaml")
    assert config.code == {}
    assert (config.model.parsed.depth, config.model.parsed.width) == (4, 1024)
    (tmp_path / "again.yaml").write_text(config_file.to_yaml(config))
    assert config_file.load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"target": "gnt"}, "awd_lm, s2vt, found 'gnt'"),
        ({"target": "gnmt", "arguments": {"dept": 4}}, "arguments: 'gnmt' has no 'dept'; did you mean 'depth'?"),
        ({"target": "gnmt", "arguments": {"depth": 5}}, "arguments: depth 5 is odd"),
        ({"target": "gnmt", "arguments": {"width": "wide"}}, "arguments: width: Input should be a valid integer, found 'wide'; change it"),
        ({"target": "s2vt", "arguments": {"dropout": 1.0}}, "arguments: dropout: Input should be less than 1, found 1.0; change it"),
        ({"target": "s2vt", "width": 4}, "width would mean nothing to 's2vt'; leave it out, or give it in arguments"),
    ],
)
def test_wrong_arguments_are_refused(model, message):
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({"model": model})
    assert message in str(caught.value)


def test_missing_arguments_are_refused():
    with pytest.raises(ValidationError, match="arguments: 'words' needs 'folder'; add it"):
        Config.model_validate({"data": {"target": "words"}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"target": "gnmt"}}, "data.target: expected translation, which model.target gnmt reads, found none"),
        (
            {"model": {"target": "gnmt"}, "data": {"target": "words", "arguments": {"folder": "there"}}},
            "data.target: expected translation, which model.target gnmt reads, found words",
        ),
        (
            {"data": {"target": "captions", "arguments": {"folder": "there"}}},
            "model.target: expected s2vt, which reads data.target captions, found none",
        ),
    ],
)
def test_a_model_and_data_that_do_not_fit_are_refused(sections, message):
    with pytest.raises(jpipe.InputError) as caught:
        data.load(Config.model_validate(sections))
    assert message in str(caught.value)
