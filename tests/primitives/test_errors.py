"""The docstring of ``primitives.errors`` lists every error class of the product. Each class has the expected
exit status."""

from __future__ import annotations

import importlib
import pkgutil
import re

import coda_agent
from coda_agent.primitives import errors

STATUSES = {
    "Refused": 1,
    "CompileError": 1,
    "OutOfBudget": 1,
    "InvalidInput": 2,
    "SpecError": 2,
    "KernelError": 2,
    "ScaffoldError": 2,
    "TipsError": 2,
    "Absent": 3,
    "JailUnavailable": 3,
    "JournalError": 3,
    "DamagedError": 2,
    "ProviderError": 3,
    "GivenUp": 3,
    "ExecutorLost": 3,
    "OutOfTime": 4,
}
HOMES = (
    "agent.artifacts",
    "agent.fleet",
    "agent.providers",
    "agent.reporting",
    "agent.run",
    "agent.scaffold",
    "agent.show",
    "agent.storage",
    "verifier",
    "verifier.sandbox",
    "verifier.spec",
)


def below(base: type[errors.CodaError]) -> dict[str, int]:
    found: dict[str, int] = {}
    for error in base.__subclasses__():
        if error.__module__.startswith("coda_agent."):  # a test may define its own errors
            found |= {error.__name__: error.exit_status} | below(error)
    return found


def test_the_drawn_tree_is_the_real_one() -> None:
    for home in HOMES:
        package = importlib.import_module(f"{coda_agent.__name__}.{home}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in ("agent.tips", "comparison.measuring", "primitives.compiler.compile_error"):
        importlib.import_module(f"{coda_agent.__name__}.{name}")
    drawn = re.findall(r"[|`]-- (\w+)", errors.__doc__ or "")
    assert sorted(drawn) == sorted(STATUSES)
    assert below(errors.CodaError) == STATUSES
