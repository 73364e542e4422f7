"""The parts of the check: what each runs on a GPU and in a rehearsal, and its share of the time."""

import os
from dataclasses import dataclass

_TESTS = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "tests.on_gpu")
_SEVERAL = "tests/jpipe/processes/test_several.py::test_several_processes_find_the_bits_of_one"
_KILLED = "tests/jpipe/processes/test_several.py::test_when_a_process_is_killed_the_other_names_it_and_what_it_waited_for"
_LAUNCH = "tests/train/launch/test_launch.py::test_a_run_that_loses_a_process_ends_with_the_results_of_an_undisturbed_run"
_NUMBERS = tuple(
    f"tests/{name}"
    for name in (
        *("jpipe/capabilities", "jpipe/checkpoints", "jpipe/model", "jpipe/runtime", "jpipe/stages", "jpipe/weights"),
        *("jpipe/test_contexts.py", "jpipe/test_pipeline.py", "jpipe/test_predict.py"),
        *("lm/generate/test_decoder.py", "lm/models", "train/losses"),
    )
)
_GPU = ("-m", "benchmarks.gpu")
_THROUGHPUT = (*_GPU, "--attention", "cudnn", "--recompute", "none", "elementwise", "--rounds", "3", "--steps", "4")
_MEMORY = (*_GPU, "--memory", "--schedule", "pipedream_2bw", "--attention", "cudnn", "--rows", "2")
_TINY = ("--tiny", "--stages", "2", "--microbatches", "2")
_OFFLOAD = ("--offload", "optimizer", "versions")


@dataclass(frozen=True)
class Part:
    """A part of the check, which one process runs.

    Attributes:
        name: what it checks.
        share: of the time; what a part leaves is divided among the parts after it.
        command: the arguments of Python.
        rehearsal: the arguments in a rehearsal on CPU devices.
    """

    name: str
    share: float
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]

    @property
    def has_tests(self) -> bool:
        """Whether the part runs tests; other parts measure."""
        return "pytest" in self.command


def _several(name: str, share: float, group: str) -> Part:
    command = (*_TESTS, f"{_SEVERAL}[{group}]")
    return Part(name, share, command, command)


def _throughput(schedule: str, share: float) -> Part:
    rehearsal = (*_GPU, *_TINY, "--recompute", "none", "elementwise", "--rounds", "1", "--steps", "2")
    chosen = ("--schedule", schedule)
    return Part(f"throughput-{schedule}", share, (*_THROUGHPUT, *chosen), (*rehearsal, *chosen))


PARTS = (
    _several("two-processes", 70, "2"),
    _several("two-processes-schedules", 80, "2, schedules"),
    _several("two-processes-options", 70, "2, options"),
    _several("four-processes", 50, "4"),
    Part("killed-process", 30, (*_TESTS, _KILLED), (*_TESTS, _KILLED)),
    Part("resume", 40, (*_TESTS, _LAUNCH), (*_TESTS, _LAUNCH)),
    _throughput("pipedream_flush", 80),
    _throughput("pipedream_2bw", 50),
    Part("dispatch", 25, ("-m", "benchmarks.dispatch", "--steps", "10"), ("-m", "benchmarks.dispatch", "--steps", "1")),
    Part("memory", 25, _MEMORY, (*_GPU, "--memory", *_TINY)),
    Part("host-memory", 25, (*_MEMORY, *_OFFLOAD), (*_GPU, "--memory", *_TINY, *_OFFLOAD)),
    Part("numbers", 55, (*_TESTS, "-n", str(min(os.cpu_count() or 1, 8)), *_NUMBERS, "-m", "not slow"), (*_TESTS, "tests/train/losses")),
)
"""In this order: what has never run comes first. The shares are seconds of ten minutes."""
