"""The errors that end a command, and the exit status of each. This module needs only the standard library.

    CodaError
    |-- Refused           1  the command did its work, and the answer is no
    |   |-- CompileError        the compiler refuses a lowered module
    |   `-- OutOfBudget         a run's limit is reached
    |-- InvalidInput      2  a file or value from the user cannot be used:
    |   |-- SpecError           a spec
    |   |-- KernelError         a file of an accepted kernel
    |   |-- ScaffoldError       a PyTorch function from which to make a spec
    |   `-- TipsError           the tips log
    |-- Absent            3  something required is missing on this machine:
    |   |-- JailUnavailable     the system's features that confine a kernel
    |   |-- JournalError        a run's journal
    |   |   `-- DamagedError    exit status 2: the journal exists but is damaged
    |   |-- ProviderError       an answer from a provider
    |   |-- GivenUp             a worker that can finish one task of a sweep
    |   `-- ExecutorLost        all workers of a sweep
    `-- OutOfTime         4  the time given to a comparison is used up

Each message names the place, the value and the remedy. An error has its own class only if some caller catches
it separately, or if it has another exit status. Exceptions that a caller turns into a value (`ProgramError`,
a gate's `Failed`, a deadline's `Late`) are not CodaErrors, because they never end a command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class CodaError(Exception):
    """An error with a message for the user, which ends a command with `exit_status`."""

    exit_status: int


class Refused(CodaError):
    """The command did its work, and the answer is no: for example, a kernel is rejected, a budget is spent,
    or git refuses."""

    exit_status = 1


class InvalidInput(CodaError):
    """A file or value from the user cannot be used. The message names the file or value, the reason and the
    remedy."""

    exit_status = 2


class Absent(CodaError):
    """Something required is missing on this machine. The message names the missing thing, and says how to
    get it."""

    exit_status = 3


def first_fault(error: ValidationError, *outer: str) -> str:
    """The place and the message of a validation's first error. ``outer``: the place of the whole value."""
    first = error.errors()[0]
    place, message = ".".join(map(str, (*outer, *first["loc"]))), first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
