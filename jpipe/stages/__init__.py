"""A stage as pure functions: forward, backward, update; what its backward takes over; compiled ahead of time."""

from jpipe.stages._standalone import StandaloneStage

__all__ = ["StandaloneStage"]
