"""A circuit breaker: when a server that is away is asked again, and by whom."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Keeps tries from a server that is away. Not for several threads.

    closed: every try is sent, until `failures` in a row have failed. Open: none is, for a pause. Then one is, the
    probe, and the others go on waiting: if it succeeds the breaker is closed, if not the next pause is twice as long.
    """

    def __init__(self, failures: int, pause: float, longest_pause: float, clock: Callable[[], float] = time.monotonic):
        self._failures, self._first_pause, self._longest_pause, self._clock = failures, pause, longest_pause, clock
        self._reset()

    def _reset(self) -> None:
        self._failed, self._since = 0, None  # tries in a row, and when the first of them failed
        self._pause, self._until, self._probing = self._first_pause, 0.0, False

    def admit(self) -> tuple[float, bool]:
        """(0, whether it is the probe) for a try that is to be sent, whose end is to be told by one of the next three;
        (seconds, False): ask again then."""
        if self._failed < self._failures:
            return 0.0, False
        if (left := self._until - self._clock()) > 0:
            return left, False
        if self._probing:
            return 0.05, False
        self._probing = True
        return 0.0, True

    def succeeded(self) -> float:
        """Seconds that the breaker had kept tries back, 0 if it was closed."""
        seconds = self.down() if self._failed >= self._failures else 0.0
        self._reset()
        return seconds

    def failed(self, probe: bool) -> bool:
        """True if this has opened it."""
        self._failed += 1
        self._since = self._clock() if self._since is None else self._since
        opened = self._failed == self._failures
        if probe:
            self._probing, self._pause = False, min(2 * self._pause, self._longest_pause)
        if probe or opened:  # what was under way when it opened changes nothing
            self._until = self._clock() + self._pause
        return opened

    def left(self, probe: bool) -> None:
        """The try was given up."""
        if probe:
            self._probing = False

    def down(self) -> float:
        """Seconds since the first failure behind the last success."""
        return 0.0 if self._since is None else self._clock() - self._since
