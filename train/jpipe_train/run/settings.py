"""Make the settings of a run from a config."""

from jpipe_train.assemble import model
from jpipe_train.assemble.metrics import metrics, results
from jpipe_train.assemble.optimizer import learning_rate
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.data import data


def settings_of(config: Config) -> RunSettings:
    """Return the settings of the run that a config describes."""
    return RunSettings(
        record=config_file.record(config),
        seed=config.seed,
        train=config.train,
        checkpoint=config.checkpoint,
        log=config.log,
        metrics=lambda: metrics(config.eval, config.model, model.loss(config)),
        results=results(config),
        learning_rate=lambda steps: learning_rate(config.optimizer, steps),
        accumulate_batches=config.optimizer.accumulate_batches,
        fresh_optimizer=config.resume.optimizer == "reset",
        items=data.portion(config),
        loss_unit=data.loss_unit(config),
    )
