"""The decisions of process 0 for all processes: whether facts agree, all have met, or a process is lost. No sockets or threads."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Facts = Mapping[int, Mapping[str, str]]  # by process


END = "the end"
"""The name of the last meeting of all processes, at the end of the run."""


@dataclass(frozen=True)
class _Meeting:
    """A place that all processes reach, and the facts that they have stated there so far."""

    hint: str  # the advice to the user if facts differ, in a comparison, for which no process waits; empty in a meeting
    facts: dict[int, dict[str, str]] = field(default_factory=dict)  # the facts by process


@dataclass(frozen=True)
class Beat:
    """The heartbeat of a process: what it waits for and how it progresses."""

    at: str  # the calls of its main thread; "" while there is progress
    what: str = ""  # the description of its longest wait
    on: tuple[int, ...] = ()  # the processes for which it waits, if they are known
    seconds: float = 0.0  # the duration of that wait
    limit: float = math.inf  # the seconds that the wait may last
    still: float = math.inf  # seconds since this process last made progress: exchanged an array, began an instruction or ended a wait


class Coordinator:
    """The state of process 0's decisions: it takes messages of `count` processes and returns the answer for all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._meetings: dict[str, _Meeting] = {}  # those that some processes have not reached
        self._beats: dict[int, Beat] = {}

    def answer(self, sender: int, message: Message) -> Message | None:
        """Handle a message of a process (`broadcast`, `meet`, `stop` or `beat`) and return the message for all processes, or None."""
        match message:
            case {"broadcast": _}:
                return message
            case {"meet": place, "facts": facts}:
                return self._meet(sender, place, facts, message.get("hint", ""))
            case {"stop": reason}:
                return {"lost": f"process {sender} stopped: {reason}"}
            case {"beat": beat}:
                latest = self._beats[sender] = Beat(**beat | {"on": tuple(beat["on"])})  # JSON has lists only
                if latest.seconds > latest.limit and self.still() > latest.limit:  # while large arrays pass slow links, nothing is lost
                    culprit = self._culprit(sender)
                    if not self._may_wait(culprit, latest):
                        return {"lost": self._blame(sender, culprit)}
        return None

    def _meet(self, sender: int, place: str, facts: dict[str, str], hint: str) -> Message | None:
        """Record what a process says at a place. Return None until all processes have come, then whether their facts agree."""
        present = self._meetings.setdefault(place, _Meeting(hint)).facts
        present[sender] = facts
        if not hint and (early := self._finished_early()):
            return {"refused": early}
        if len(present) < self._count:
            return None
        del self._meetings[place]
        if place == END and self._meetings:
            name, comparison = next(iter(self._meetings.items()))
            return {"refused": f"only {named(comparison.facts)} came to {name}; {comparison.hint}"}
        if not hint:
            return {"met": place, "differences": _differences(present)}
        differences = _differences(present, hint)
        return {"refused": differences[0]} if differences else None

    def _finished_early(self) -> str | None:
        """Return a message if a process has finished while others wait for it at a meeting; otherwise None."""
        for place, meeting in self._meetings.items():
            for process in self.finished():
                if place != END and not meeting.hint and process not in meeting.facts:
                    return (
                        f"process {process} has finished, and '{place}' of {named(sorted(meeting.facts))} waits for it; "
                        "call the same methods of the pipeline in all processes"
                    )
        return None

    def still(self) -> float:
        """Return the seconds since the last progress in any process."""
        return min((beat.still for beat in list(self._beats.values())), default=0.0)

    def finished(self) -> set[int]:
        """Return the processes that have come to the last meeting, `END`."""
        return set(self._meetings[END].facts) if END in self._meetings else set()

    def _culprit(self, waiter: int) -> int:
        """Return the process that hangs when `waiter` has waited too long.

        The waits are followed from process to process. The culprit is the first that has waited less than half of this time, or the last if
        all wait for each other.
        """
        seconds, reached = self._beats[waiter].seconds / 2, [waiter]
        for process in reached:  # the list grows in the loop
            awaited = [other for other in self._awaited(process) if other not in reached]
            reached += awaited
            for other in awaited:
                if other not in self._beats or self._beats[other].seconds < seconds:
                    return other
        return reached[-1]

    def _may_wait(self, culprit: int, overdue: Beat) -> bool:
        """Return whether a process is within the limit of long work that it has announced."""
        beat = self._beats.get(culprit, overdue)
        return bool(beat.what) and beat.limit > overdue.limit and beat.seconds < beat.limit and not [*self._awaited(culprit)]

    def _blame(self, waiter: int, culprit: int) -> str:
        beat = self._beats[waiter]
        waited = f"process {waiter} has waited {beat.seconds:.0f} s for {beat.what}"
        if culprit == waiter:
            return waited
        if culprit not in self._beats:
            return f"process {culprit} has not joined: {waited}"
        other = self._beats[culprit]
        doing = f"waits for {other.what}" if other.seconds > beat.seconds / 2 else f"is in {other.at}"
        return f"process {culprit} hangs: {waited}, and process {culprit} {doing}"

    def _awaited(self, waiter: int) -> Iterable[int]:
        """Return the processes that a process waits for."""
        meetings = [meeting.facts for meeting in self._meetings.values() if not meeting.hint and waiter in meeting.facts]
        return self._beats[waiter].on or (k for present in meetings for k in range(self._count) if k not in present)


def _differences(facts: Facts, hint: str = "") -> list[str]:
    """Return a line for each fact in which processes differ from most others; with a `hint`, a missing or empty fact is no difference."""
    lines = []
    for name in dict.fromkeys(name for values in facts.values() for name in values):
        texts = {process: values.get(name, "") for process, values in sorted(facts.items()) if values.get(name) or not hint}
        usual, _ = Counter(texts.values()).most_common(1)[0] if texts else ("", 0)  # in a tie, the fact of the first process
        if differing := [process for process, text in texts.items() if text != usual]:
            first, other = next(process for process in texts if texts[process] == usual), texts[differing[0]]
            same = next((place for place, (a, b) in enumerate(zip(usual, other, strict=False)) if a != b), min(len(usual), len(other)))
            line = f" (line {usual.count(chr(10), 0, same) + 1})" if "\n" in usual or "\n" in other else ""
            who = f"processes {first} and {', '.join(map(str, differing))}"
            parts = f"{_around(usual, same)!r} against {_around(other, same)!r}"
            lines.append(f"{name} differs between {who}: {parts}{line}; {hint or f'start all processes with the same {name}'}")
    return lines


def named(processes: Iterable[int]) -> str:
    """Return `process 1`, or `processes 1, 3`."""
    numbers = [*map(str, processes)]
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _around(text: str, place: int) -> str:
    """Return the line of `text` around `place`, shortened on both sides."""
    begin = max(text.rfind("\n", 0, place) + 1, place - 40)
    return text[begin : place + 40].partition("\n")[0]
