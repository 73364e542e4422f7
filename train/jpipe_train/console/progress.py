"""Print the progress of a run: its phases, its loss and its speed, on a terminal as a bar and elsewhere as lines."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from jpipe_train.console.terminal import duration, printable

_RECENT = 20  # number of steps for the median speed: fewer make it flicker, more make it slow to recover from an evaluation
_SILENT = 10.0  # without a bar, a line is printed at most once in this many seconds


class Reporter:
    """Prints the progress of a run of `steps` steps. Each step processes `per_step` tokens or samples (`unit`); `clock` is in seconds."""

    def __init__(
        self, steps: int, per_step: int, unit: str, console: Console | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console = console or Console(highlight=False)
        self.plan_steps(steps)
        self._per_step = per_step
        self.unit = unit
        self._clock = clock
        self._began = clock()
        self._last: float | None = None  # the time when the last step was finished
        self._ticked: int | None = None  # the number of the last finished step
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds from one finished step to the next
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
        self._bar = Progress(*columns, console=self._console) if self._console.is_terminal else None
        self._task: TaskID | None = None

    def plan_steps(self, steps: int) -> None:
        """Set the number of steps of the run. Call this before training."""
        self._steps = steps
        self._every = max(1, steps // 20)  # without a bar, about twenty lines per run

    def say(self, words: str) -> None:
        """Print one line, above the bar if there is one."""
        self._console.print(printable(words), markup=False, soft_wrap=True)

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()) -> None:
        """Print rows in aligned columns.

        The first column has the names of the rows. If the columns do not fit side by side, the remaining ones follow in additional tables.
        The first column and columns with a header in `words` are aligned left, the others right.
        """
        head = [printable(cell) for cell in head]
        lines = [head, *([printable(cell) for cell in row] for row in rows)]
        widths = [max(cell_len(line[i]) for line in lines) for i in range(len(head))]
        parts: list[list[int]] = [[0]]
        for i in range(1, len(head)):
            if len(parts[-1]) > 1 and sum(widths[k] + 2 for k in (*parts[-1], i)) - 2 > self._console.width:
                parts.append([0])
            parts[-1].append(i)
        for part in parts:
            table = Table(box=None, pad_edge=False)
            for i in part:
                table.add_column(Text(head[i]), justify="left" if i == 0 or head[i] in words else "right", no_wrap=True)
            for line in lines[1:]:
                table.add_row(*(Text(line[i]) for i in part))
            self._console.print(table)

    @contextmanager
    def phase(self, words: str, remark: object = "") -> Iterator[None]:
        """Announce a phase, and afterwards print its duration, followed by the text of `remark`."""
        start = self._clock()
        if self._bar:
            with self._console.status(f"{words} …"):
                yield
        else:
            self.say(f"{words} …")
            yield
        self.say(f"{words}: {self._clock() - start:.1f} s{remark}")

    @contextmanager
    def counting(self, words: str) -> Iterator[Callable[[int, int], None]]:
        """Announce work that consists of parts. Yield a function to call with the number of finished parts and the total.

        On a terminal a bar shows both numbers; elsewhere a line is printed at most every `_SILENT` seconds.
        """
        with self._shown(words, (MofNCompleteColumn(),), lambda done, total: f"{done:,} of {total:,}") as (progress, _):
            yield progress

    @contextmanager
    def reading(self, words: str, total: int) -> Iterator[Callable[[int], None]]:
        """Announce the reading of `total` bytes. Yield a function to call with the number of bytes that were just read.

        The progress is shown as in `counting`.
        """
        columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        with self._shown(words, columns, lambda done, total: f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB") as (progress, remarks):
            began, read = self._clock(), 0

            def advance(more: int) -> None:
                nonlocal read
                read += more
                progress(read, total)

            yield advance
            remarks.append(f"{total / 1e6 / max(self._clock() - began, 1e-9):.1f} MB/s")

    @contextmanager
    def _shown(
        self, words: str, columns: Sequence[ProgressColumn], amount: Callable[[int, int], str]
    ) -> Iterator[tuple[Callable[[int, int], None], list[str]]]:
        """Announce work. Yield a function that shows how much is done, and a list of remarks to print with the duration at the end."""
        start = said = self._clock()
        remarks: list[str] = []

        def say(done: int, total: int) -> None:
            nonlocal said
            if (now := self._clock()) - said >= _SILENT:
                said = now
                self.say(f"{words}: {amount(done, total)} after {now - start:.0f} s")

        if not self._console.is_terminal:
            self.say(f"{words} …")
            yield say, remarks
        else:
            with Progress(TextColumn(words), BarColumn(), *columns, console=self._console, transient=True) as bar:
                task = bar.add_task("", total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total), remarks
        self.say(", ".join([f"{words}: {self._clock() - start:.1f} s", *remarks]))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Show the bar during this context."""
        if self._bar is None:
            yield
            return
        with self._bar:
            self._task = self._bar.add_task("", total=self._steps)
            yield

    def tick(self, step: int) -> None:
        """Record that step `step` is finished now, unless that is recorded already. `speed` then includes the step."""
        if step == self._ticked:
            return
        now, self._ticked = self._clock(), step
        if self._last is not None:
            self._recent.append(now - self._last)
        self._last = now

    def step(self, step: int, loss: float, validation: Mapping[str, float], bubble: float | None = None, mfu: float | None = None) -> None:
        """Report that step `step` is finished, with its validation, named as in `metrics.jsonl`, and the last measured bubble."""
        self.tick(step)
        words = f"loss {loss:.3f}"
        if self.speed is not None:
            words += f"  {self.speed:,.0f} {self.unit}/s"
        if mfu is not None:
            words += f"  MFU {mfu:.1%}"
        if bubble is not None:
            words += f"  bubble {bubble:.0%}"
        if self._recent:
            words += f"  {duration((self._steps - step - 1) * statistics.median(self._recent))} left"
        shown = "  ".join(f"{name.replace('val_', 'validation ', 1)} {value:.3f}" for name, value in validation.items())
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step + 1, description=words)
            if validation:
                self.say(f"step {step}  {shown}")
        elif validation:
            self.say(f"step {step}  {words}  {shown}")
        elif (step + 1) % self._every == 0:
            self.say(f"step {step}  {words}")

    @property
    def speed(self) -> float | None:
        """The tokens or samples per second in the recent steps; None if `step_seconds` is None."""
        return None if self.step_seconds is None else self._per_step / self.step_seconds

    @property
    def width(self) -> int:
        """The number of columns of the terminal."""
        return self._console.width

    @property
    def step_seconds(self) -> float | None:
        """The median duration of the recent steps, or None until two are finished, because the first includes one-time work."""
        seconds = statistics.median(self._recent) if self._recent else 0.0
        return seconds if seconds > 0 else None

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including start-up."""
        return self._clock() - self._began
