"""A stage as pure functions (forward, backward, update), its residuals, and its compilation ahead of time."""

from jpipe.stages._standalone import StandaloneStage

__all__ = ["StandaloneStage"]
