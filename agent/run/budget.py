"""The limits of a run, and its spending. Before a request, its highest possible cost is reserved. After the
request, the actual cost replaces the reservation; the request is then settled.

The journal records every charge, so no charge is lost if the process is killed. The usage of a request may
stay unknown, because the request was killed or cut off, or because the answer states no usage. Then the
reservation remains as an uncertain charge.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from coda_agent.agent.providers import Charge, OutOfBudget, Turn, Usage
from coda_agent.agent.providers.prices import price
from coda_agent.agent.storage.journal import GPU_SECONDS, Event, Journal

RESERVED, SETTLED = "reserved", "settled"  # kinds of journal events
FEWEST_TOKENS = 1024  # an answer of fewer tokens is not worth a request
MILLION = 1_000_000
T = TypeVar("T")


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run: tokens (input, output and cached), US dollars, seconds of measurement on a GPU,
    and seconds for one command. None means unlimited."""

    tokens: int | None = None
    dollars: float | None = None
    gpu_seconds: float | None = None
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunLimits:
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})

    def shared(self, parts: int) -> RunLimits:
        """The limits of one candidate, if ``parts`` candidates share the budget equally. The limit on a
        command's time is not divided."""
        tokens = None if self.tokens is None else self.tokens // parts
        dollars = None if self.dollars is None else self.dollars / parts
        gpu_seconds = None if self.gpu_seconds is None else self.gpu_seconds / parts
        return replace(self, tokens=tokens, dollars=dollars, gpu_seconds=gpu_seconds)


@dataclass(frozen=True)
class Spent:
    """The spending of a run. ``dollars`` covers only requests with a known cost in dollars. ``tokens`` and
    ``dollars`` include the uncertain tokens and dollars."""

    tokens: int = 0
    dollars: float = 0.0
    uncertain_tokens: int = 0
    uncertain_dollars: float = 0.0
    gpu_seconds: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __str__(self) -> str:
        words = [f"{self.tokens:,} tokens"]
        words += [f"${self.dollars:.2f}"] if self.dollars else []
        words += [f"of these {self.uncertain_tokens:,} tokens uncertain"] if self.uncertain_tokens else []
        words += [f"{self.gpu_seconds:.0f} s of GPU"] if self.gpu_seconds else []
        return ", ".join(words)


def spent(events: Iterable[Event]) -> Spent:
    """Add up the spending in a run's events."""
    charges: dict[str, Spent] = {}  # by request; settling replaces the reserved charge
    last: dict[str, str] = {}  # the last request of each turn
    gpu_seconds = 0.0
    for event in events:
        place, payload = event.key.partition("/")[2], event.payload
        if event.kind == RESERVED:
            last[place.partition(".")[0]] = place
            tokens, dollars = payload["input_tokens"] + payload["max_tokens"], payload["dollars"] or 0.0
            charges[place] = Spent(tokens, dollars, tokens, dollars)
        elif event.kind in (SETTLED, "answer"):
            usage, request = Usage(**payload.get("usage", {})), last.get(place, place)
            told = event.kind == SETTLED or usage.total > 0  # if false, the reservation stays charged
            if told or request not in charges:
                charges[request] = Spent(usage.total, payload.get("dollars") or 0.0)
        gpu_seconds += payload.get(GPU_SECONDS, 0.0)
    return sum(charges.values(), Spent(gpu_seconds=gpu_seconds))


class Purse:
    """A budget that the runs of a process share. Each run has its own ledger.

    The runs' journals hold the charges; the purse only adds the charges up. Requests are reserved one after
    the other, so that all requests in flight together fit the budget. ``began``: the time, by
    ``time.monotonic``, from which the budget's seconds count.
    """

    def __init__(self, before: Mapping[str, Spent] | None = None):
        self.began = time.monotonic()
        self.turns = threading.Condition(threading.RLock())
        self.stopped = ""  # why no further requests may start
        self._spent = dict(before or {})  # spending by run
        self._pending: set[str] = set()  # runs with a request in flight

    def stop(self, reason: str) -> None:
        """Allow no further requests or measurements, because of ``reason``."""
        with self.turns:
            self.stopped = reason
            self.turns.notify_all()

    def total(self, run: str = "", own: Spent | None = None) -> Spent:
        """The spending of all runs. ``own``: the current spending of the run ``run``, which replaces the
        spending that the purse has recorded for this run."""
        with self.turns:
            if own is not None:
                self._spent[run] = own
            return sum(self._spent.values(), Spent())

    def reserved(self, run: str, own: Spent) -> None:
        """Record that a run has reserved a request. ``own``: the run's spending with this reservation."""
        with self.turns:
            self._pending.add(run)
            self._spent[run] = own

    def settled(self, run: str, own: Spent) -> None:
        """Record that a run's request has ended. The request may have cost less than was reserved."""
        with self.turns:
            self._pending.discard(run)
            self._spent[run] = own
            self.turns.notify_all()

    def may_refund(self) -> bool:
        """Whether a request in flight may return part of its reservation."""
        return bool(self._pending) and not self.stopped


@dataclass
class BudgetLedger:
    """Reserve and settle one run's requests, and record their cost in the journal. ``turn``: the number of
    the turn that makes the requests. ``purse``: a budget that several runs share."""

    journal: Journal
    limits: RunLimits = RunLimits()
    turn: int = 0
    began: float = field(default_factory=time.monotonic)
    purse: Purse | None = None
    _model: str = ""  # the last request's model

    def __post_init__(self) -> None:
        self.began = self.purse.began if self.purse else self.began

    def spent(self) -> Spent:
        """The run's own spending."""
        return spent(self.journal.events())

    def _total(self) -> Spent:
        own = self.spent()
        return self.purse.total(self._run, own) if self.purse else own

    @property
    def _run(self) -> str:
        return str(self.journal.header["run"])

    def close_turn(self) -> None:
        """Tell the purse that the turn's requests have ended."""
        if self.purse:
            self.purse.settled(self._run, self.spent())

    def reserve(self, model: str, input_tokens: int, max_tokens: int) -> Charge:
        """Reserve the cost of a request whose answer has at most ``max_tokens``; return the charge. Raises
        OutOfBudget if too little of the budget is left, or if dollars are limited and ``model`` has no known
        price. Before raising, waits while requests of other runs may still return part of their
        reservation."""

        def reserve() -> Charge:
            charge = self._reserve(model, input_tokens, max_tokens)
            if self.purse:
                self.purse.reserved(self._run, self.spent())
            return charge

        return self._affordable(reserve)

    def _affordable(self, act: Callable[[], T]) -> T:
        """Return the result of ``act``. If there is a purse and ``act`` raises OutOfBudget, repeat ``act``
        while requests of other runs may still return part of their reservation."""
        if not self.purse:
            return act()
        with self.purse.turns:
            self.purse.settled(self._run, self.spent())  # an earlier, failed request may still be pending
            while True:
                try:
                    return act()
                except OutOfBudget:
                    self.timely()
                    if not self.purse.may_refund():
                        raise
                    self.purse.turns.wait(1.0)

    def _reserve(self, model: str, input_tokens: int, max_tokens: int) -> Charge:
        so_far = self._afford()
        left = self._left(model, input_tokens, so_far)
        if left is not None and left < min(FEWEST_TOKENS, max_tokens):
            raise OutOfBudget(
                f"the budget has {max(left, 0)} tokens left for an answer, after {so_far}; "
                "resume the run with a larger --budget-tokens or --budget-dollars"
            )
        granted = max_tokens if left is None else min(max_tokens, left)
        worst = Usage(cache_write_tokens=input_tokens, output_tokens=granted)
        payload = {"model": model, "input_tokens": input_tokens, "max_tokens": granted}
        place = f"{self.turn}.{1 + self._requests()}"
        self.journal.once(f"{RESERVED}/{place}", RESERVED, lambda: payload | {"dollars": price(model, worst)})
        self._model = model
        return _Charge(self.journal, place, model, granted)

    def answered(self, turn: Turn) -> dict[str, Any]:
        """The ``dollars`` field to add to the event of an answer; empty if the answer's cost is unknown."""
        told = turn.dollars
        dollars = price(self._model, turn.usage) if told is None and self._model else told
        return {} if dollars is None else {"dollars": dollars}

    def afford(self) -> None:
        """Raise OutOfBudget if time, tokens or dollars are used up."""
        self._affordable(self._afford)

    def _afford(self) -> Spent:
        so_far = self._total()
        self._within("tokens", so_far.tokens)
        self._within("dollars", so_far.dollars)
        self.timely()
        return so_far

    def afford_gpu(self) -> None:
        """Raise OutOfBudget if no further measurement may start."""
        self._within("gpu_seconds", self._total().gpu_seconds)
        self.timely()

    @property
    def deadline(self) -> float | None:
        """The time, by ``time.monotonic``, at which this command must end; None means unlimited."""
        return None if self.limits.seconds is None else self.began + self.limits.seconds

    def timely(self) -> None:
        """Raise OutOfBudget if this command's time is up, or if the purse allows no further requests."""
        if self.purse and self.purse.stopped:
            raise OutOfBudget(self.purse.stopped)
        # every provider also receives this deadline
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise self.late()

    def late(self) -> OutOfBudget:
        """The error for a command whose time is up."""
        return self._used_up("seconds", time.monotonic() - self.began)

    def _requests(self) -> int:
        """The number of this turn's reservations."""
        return sum(e.key.startswith(f"{RESERVED}/{self.turn}.") for e in self.journal.events())

    def _within(self, name: str, value: float) -> None:
        limit = getattr(self.limits, name)
        if limit is not None and value >= limit:
            raise self._used_up(name, value)

    def _used_up(self, name: str, value: float) -> OutOfBudget:
        limit = getattr(self.limits, name)
        return OutOfBudget(
            f"{value:,.6g} of {limit:,.6g} {name.replace('_', ' ')} used; resume the run with a "
            f"larger --budget-{name.replace('_', '-')}"
        )

    def _left(self, model: str, input_tokens: int, so_far: Spent) -> int | None:
        """The tokens that an answer may have after ``input_tokens`` of input; None means unlimited."""
        limits, left = self.limits, []
        if limits.tokens is not None:
            left.append(limits.tokens - so_far.tokens - input_tokens)
        if limits.dollars is not None and model:
            read = price(model, Usage(cache_write_tokens=input_tokens))
            written = price(model, Usage(output_tokens=MILLION))
            if read is None or written is None:
                raise OutOfBudget(f"no price is known for {model}; use --budget-tokens instead")
            left.append(int((limits.dollars - so_far.dollars - read) / written * MILLION))
        return min(left, default=None)


@dataclass
class _Charge:
    journal: Journal
    place: str
    model: str
    max_tokens: int

    def settle(self, usage: Usage, dollars: float | None = None) -> None:
        paid = price(self.model, usage) if dollars is None else dollars
        payload = {"usage": asdict(usage), "dollars": paid}
        self.journal.once(f"{SETTLED}/{self.place}", SETTLED, lambda: payload)
