"""The `jpipe` command: jpipe's own packages are imported, whatever `train.py`, `planner.py` or `jpipe.py` comes first on `sys.path`.

The current folder is on it more often than one thinks: an empty entry of `PYTHONPATH`, as `PYTHONPATH=$PYTHONPATH:folder` leaves, means it.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OUR_PACKAGES = ("jpipe", "planner", "train")
_HERE = os.path.dirname(os.path.abspath(__file__))


class _OursFirst:
    """Finds jpipe's packages beside this file, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What `importlib` asks every finder."""
        return PathFinder.find_spec(name, [_HERE]) if name in OUR_PACKAGES else None


def main() -> int:
    """Run the command line of this process and return the exit code."""
    sys.meta_path.insert(0, _OursFirst)
    from train.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
