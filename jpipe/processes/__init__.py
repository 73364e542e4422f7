"""Between processes: who is there, how they talk, and the links that carry arrays."""

from jpipe.processes._membership import Processes

__all__ = ["Processes"]
