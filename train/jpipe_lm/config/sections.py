"""The sections of a config as classes of this package, for runs that are known to have a language model or text."""

from jpipe_lm.config.data_config import DataConfig
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.tune_config import TuneConfig
from jpipe_train.config.config import Config


def model_of(config: Config) -> ModelConfig:
    """Return the section `model` of a run with a language model of this package."""
    assert isinstance(config.model, ModelConfig)
    return config.model


def data_of(config: Config) -> DataConfig:
    """Return the section `data` of a run that learns from text."""
    assert isinstance(config.data, DataConfig)
    return config.data


def tune_of(config: Config) -> TuneConfig:
    """Return the section `tune` of a run with a language model of this package."""
    assert isinstance(config.tune, TuneConfig)
    return config.tune
