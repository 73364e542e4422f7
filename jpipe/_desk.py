"""What process 0 decides for all processes of a run: whether they agree, when all have met, who is lost. No sockets, no threads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Beat:
    """What a process says of itself each beat.

    Attributes:
        at: where its main thread is.
        what: its longest wait is for, in words.
        on: the process waited for, where it is one.
        seconds: that it has lasted.
        limit: that it may last.
        still: seconds since arrays have last moved between this process and any other.
    """

    at: str
    what: str = ""
    on: int | None = None
    seconds: float = 0.0
    limit: float = math.inf
    still: float = math.inf


class Desk:
    """What process 0 decides for all. It takes messages and gives the answer that goes to everybody.

    Args:
        count: how many processes there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._meetings: dict[str, dict[int, dict[str, str]]] = {}
        self._beats: dict[int, Beat] = {}

    def answer(self, sender: int, message: Message) -> Message | None:
        """What all are told, now that `sender` has sent this; None for nothing.

        Args:
            sender: the index of a process.
            message: one of `tell`, `meet`, `stop` and `beat`.
        """
        match message:
            case {"tell": _}:
                return message
            case {"meet": place, "facts": facts}:
                present = self._meetings.setdefault(place, {})
                present[sender] = facts
                if len(present) == self._count:
                    return {"met": place, "differences": _differences(self._meetings.pop(place))}
            case {"stop": reason}:
                return {"lost": f"process {sender} stopped: {reason}"}
            case {"beat": beat}:
                own = self._beats[sender] = Beat(**beat)
                still = min(other.still for other in self._beats.values())
                if own.seconds > own.limit and still > own.limit:  # not while large arrays are on their way, over slow links
                    return {"lost": self._blame(sender)}
        return None

    def _blame(self, waiter: int) -> str:
        """Who hangs, when `waiter` has waited too long: whoever it waits for, or who that one waits for, to the end of the chain."""
        beat = self._beats[waiter]
        waited = f"process {waiter} has waited {beat.seconds:.0f} s for {beat.what}"
        chain = [waiter]  # ends before it closes, where they wait for each other
        while (awaited := self._awaited(chain[-1], beat.seconds / 2)) is not None and awaited not in chain:
            chain.append(awaited)
        culprit = chain[-1]
        if culprit == waiter:
            return waited
        if culprit not in self._beats:
            return f"process {culprit} has not joined: {waited}"
        other = self._beats[culprit]
        doing = f"waits for {other.what}" if other.seconds > beat.seconds / 2 else f"is in {other.at}"
        return f"process {culprit} hangs: {waited}, and process {culprit} {doing}"

    def _awaited(self, waiter: int, seconds: float) -> int | None:
        """The process that `waiter` has waited for at least so long."""
        beat = self._beats.get(waiter)
        if beat is None or beat.seconds < seconds:
            return None
        absent = (k for present in self._meetings.values() if waiter in present for k in range(self._count) if k not in present)
        return beat.on if beat.on is not None else next(absent, None)


def _differences(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line for each fact in which a process differs from process 0."""
    lines = []
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        first = facts[0].get(name, "")
        others = [process for process, own in sorted(facts.items()) if own.get(name, "") != first]
        if others:
            other = facts[others[0]].get(name, "")
            same = next((place for place, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
            line = f" (line {first.count(chr(10), 0, same) + 1})" if "\n" in first or "\n" in other else ""
            who = f"processes 0 and {', '.join(map(str, others))}"
            parts = f"{_around(first, same)!r} against {_around(other, same)!r}"
            lines.append(f"{name} differs between {who}: {parts}{line}; start all processes with the same {name}")
    return lines


def _around(text: str, place: int) -> str:
    """The line of `text` that `place` is in, without what is far from it."""
    begin = max(text.rfind("\n", 0, place) + 1, place - 40)
    return text[begin : place + 40].partition("\n")[0]
