"""The pure functions of a stage (forward, backward, update), and their compilation ahead of time."""

from jpipe.stages._standalone import StandaloneStage

__all__ = ["StandaloneStage"]
