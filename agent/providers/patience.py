"""Retry the requests of a provider that uses a network, and limit the time of one answer.

Outages last from seconds to hours, and runs continue overnight without a person. So retries of a transient
fault are limited by time, not by number. Permanent faults are raised at once. The total time of a stream is
limited too. A read timeout is not enough, because the API's pings can keep open a stream that has no content.
"""

from __future__ import annotations

import email.utils
import math
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coda_agent.agent.providers import OutOfBudget, ProviderError, Question, Turn

if TYPE_CHECKING:
    import httpx2

EMPTY = 3  # give up a question after this many empty answers
# Give up a question after this many failed requests of unknown cost, because retrying them all night would be
# expensive.
UNKNOWN = 12


@dataclass(frozen=True)
class Fault:
    """Why a request gave no answer. `most`: give up the question after this many equal faults. `retry_after`:
    the wait that the server asks for, in seconds; 0 if it asks for none. `unknown`: whether the request may
    have cost an unknown amount."""

    message: str
    remedy: str
    most: float = 1
    retry_after: float = 0.0
    unknown: bool = False


@dataclass(frozen=True)
class Patience:
    """How long to retry, in seconds. ``total``: the time for all retries of one question. ``backoff``: the
    first wait; each further wait is twice as long. ``longest``: the limit on one wait, even if the server
    asks for a longer wait."""

    total: float = 2 * 3600.0
    backoff: float = 1.0
    longest: float = 60.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Asking:
    """Counts the requests for one question, and tracks the time that is left.

    `deadline`: the time from which an answer is useless, by the clock of `patience`; None for no deadline.
    """

    def __init__(self, patience: Patience, deadline: float | None):
        self._patience = patience
        self._deadline = math.inf if deadline is None else deadline
        self._began = patience.clock()
        self.requests = 0

    def time_left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - self._patience.clock()

    def over(self) -> bool:
        """Whether the time for retries is over. The last wait ends at the end of this time, and one more
        request follows."""
        return self._taken() >= self._patience.total

    def wait(self, why: str, retry_after: float, say: Callable[[str], None]) -> None:
        """Sleep before the next request. The wait is ``retry_after``, or the backoff if ``retry_after`` is 0.
        The limits in `Patience` and the deadline may shorten the wait. `say` receives the reason and the
        times."""
        patience = self._patience
        doubled = patience.backoff * 2 ** min(self.requests - 1, 30)
        # jitter keeps parallel runs from retrying together
        wished = retry_after or min(doubled, patience.longest) * random.uniform(0.75, 1.0)
        left, time_left = patience.total - self._taken(), self.time_left()
        seconds = max(0.0, min(wished, patience.longest, left, time_left))
        ahead = f"asking again in {_duration(seconds)}; retries end within {_duration(left)}"
        if time_left <= seconds:
            ahead = f"the run's time ends in {_duration(seconds)}"
        say(f"\n[{why}; {ahead}]\n")
        patience.sleep(seconds)

    def __str__(self) -> str:
        return f"{self.requests} requests in {_duration(self._taken())}"

    def _taken(self) -> float:
        return self._patience.clock() - self._began


def persist(
    attempt: Callable[[float], Turn | Fault | OutOfBudget], question: Question, patience: Patience
) -> Turn:
    """Repeat ``attempt`` until it succeeds, and return its turn. ``attempt`` takes the seconds until the
    deadline. Raises ProviderError for a permanent fault, after the last retry that a fault allows, when the
    time for retries ends, and at the question's deadline. Raises an OutOfBudget that ``attempt`` returns."""
    asking, ended, why = Asking(patience, question.deadline), Counter[Fault](), ""
    while (left := asking.time_left()) > 0:
        result = attempt(left)
        asking.requests += 1
        if isinstance(result, Turn):
            return result
        # Raise the error here. In ``attempt``, its __context__ could be an SDK exception, which may hold the
        # API key.
        if isinstance(result, OutOfBudget):
            raise result
        ended[result] += 1
        why = result.message
        unknown = sum(times for fault, times in ended.items() if fault.unknown)
        if ended[result] >= result.most or unknown >= UNKNOWN or asking.over():
            made = f" ({asking})" if asking.requests > 1 else ""
            raise ProviderError(why + made, result.remedy, retryable=result.most > 1)
        asking.wait(why, result.retry_after, question.say)
    late = "the run's time ended before an answer came" + (f": {why} ({asking})" if why else "")
    raise ProviderError(late, "resume the run with a larger --budget-seconds", retryable=True)


class TookTooLong(Exception):
    """A response was still incomplete at its time limit."""


@contextmanager
def whole_within(response: httpx2.Response, seconds: float) -> Iterator[None]:
    """Limit the time that the block may take to read a response. At the limit, shut down the response's
    connection and raise TookTooLong.

    The reader may be waiting for bytes, or receiving endless pings, which the SDK hides. In either case, only
    shutting down the connection ends the read.
    """
    import httpx2

    line = response.extensions["network_stream"].get_extra_info("socket")
    late = threading.Event()

    def shut() -> None:
        late.set()
        with suppress(OSError):  # the connection may already be closed
            line.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except httpx2.RequestError:
        if late.is_set():
            raise TookTooLong(f"no complete answer within {_duration(seconds)}") from None
        raise
    finally:
        timer.cancel()


def retry_after(headers: httpx2.Headers) -> float:
    """The wait that the server asks for, in seconds; 0 if the server asks for no wait. The header is
    Retry-After (a number of seconds, or a date) or retry-after-ms (milliseconds)."""
    for value, scale in ((headers.get("retry-after-ms"), 1e-3), (headers.get("retry-after"), 1.0)):
        try:
            return max(0.0, float(value or "") * scale)  # NaN counts as 0
        except ValueError:
            continue
    date = email.utils.parsedate_tz(headers.get("retry-after") or "")
    return max(0.0, email.utils.mktime_tz(date) - time.time()) if date else 0.0


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
