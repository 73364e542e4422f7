"""A stage as pure functions (forward, backward, update), its residuals, and its compilation ahead of time."""

from jpipe.stages._standalone import StandaloneStage
from jpipe.stages.functions._stage import StageFunctions
from jpipe.stages.functions._update import update

__all__ = ["StageFunctions", "StandaloneStage", "update"]
