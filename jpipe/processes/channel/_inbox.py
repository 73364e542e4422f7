"""The messages that have come to this process, and the threads that wait for them."""

import threading
from collections.abc import Callable

from jpipe.errors import InputError, PeerLost

_MAX_UNREAD = 65536  # unread messages; beyond that the oldest are dropped
_BLAME_SECONDS = 20.0  # after a failure: by then it is known whether the death of another process caused it


class Inbox:
    """Messages by name and answers by place. Threads wait for them until the run is lost, or an unawaited thread fails.

    Attributes:
        lost: how the run was lost, in one line, or None.
    """

    def __init__(self) -> None:
        self.lost: str | None = None
        self._error: type[InputError | PeerLost] = PeerLost
        self._failed: BaseException | None = None
        self._messages: dict[str, tuple[float, ...]] = {}
        self._answers: dict[str, list[str]] = {}
        self._changed = threading.Condition()  # guards the four above

    def put_message(self, name: str, values: tuple[float, ...]) -> None:
        """Add numbers under a name; of more than 65,536 unread ones the oldest are dropped."""
        with self._changed:
            self._messages[name] = values
            if len(self._messages) > _MAX_UNREAD:
                del self._messages[next(iter(self._messages))]
            self._changed.notify_all()

    def put_answer(self, place: str, differences: list[str]) -> None:
        """Record that all have met at a place; `differences` are those between their facts."""
        with self._changed:
            self._answers[place] = differences
            self._changed.notify_all()

    def lose(self, how: str, error: type[InputError | PeerLost] = PeerLost) -> None:
        """Lose the run: all waits raise this error, now and later."""
        with self._changed:
            self.lost, self._error = how, error
            self._changed.notify_all()

    def has_message(self, name: str) -> bool:
        """Return whether unread numbers have come under that name."""
        return name in self._messages

    def message(self, name: str) -> tuple[float, ...]:
        """Wait for numbers under that name, and remove them; raise as `check`."""
        with self._changed:
            self._await(lambda: name in self._messages)
            return self._messages.pop(name)

    def answer(self, place: str) -> list[str]:
        """Wait until all have met there; raise as `check`."""
        with self._changed:
            self._await(lambda: place in self._answers)
            return self._answers.pop(place)

    def lost_within(self, seconds: float) -> str | None:
        """Return how the run is lost, waiting up to this time, or None."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, timeout=seconds)
            return self.lost

    def loss(self) -> Exception | None:
        """Return the error to raise if the run is lost."""
        return None if self.lost is None else self._error(self.lost)

    def fail(self, error: BaseException) -> None:
        """Record that a thread failed by `error`: all waits raise it, unless the run is lost soon, which mostly is the cause."""
        if self.lost_within(_BLAME_SECONDS) is None:
            with self._changed:
                self._failed = self._failed or error
                self._changed.notify_all()

    def check(self) -> None:
        """Return unless the run is lost or a thread has failed.

        Raises:
            PeerLost: the run is lost.
            InputError: the run is lost because the user's arguments differ between processes.
        """
        if (loss := self.loss()) is not None:
            raise loss
        if self._failed is not None:
            raise self._failed

    def _await(self, is_met: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: is_met() or self.lost is not None or self._failed is not None)
        if not is_met():
            self.check()
