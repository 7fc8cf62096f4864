"""Print a campaign's results: mutants and rewrites by kind, wrong acceptances and wrong rejections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from benchmarks.campaign.judge import INAPPLICABLE, Result


def show(results: list[Result]) -> None:
    """Print the tables, each followed by the results that deserve attention."""
    console = Console(width=None)
    made = [r for r in results if r["verdict"] != INAPPLICABLE]
    mutants = [r for r in made if r["group"] == "mutants"]
    rewrites = [r for r in made if r["group"] == "rewrites"]
    if mutants:
        console.print(_mutants(mutants))
        _listed(console, "accepted, and they differ", [r for r in mutants if slipped(r)], "differs")
        _listed(console, "crashed", [r for r in mutants if r["verdict"] == "crashed"], "reason")
    if rewrites:
        console.print(_rewrites(rewrites))
        _listed(console, "refused", [r for r in rewrites if r["verdict"] != "accepted"], "reason")
        _listed(console, "not equal after all", [r for r in rewrites if r["differs"]], "differs")


def slipped(result: Result) -> bool:
    """Whether a mutant that differs from the original was accepted."""
    return result["verdict"] == "accepted" and bool(result["differs"])


def _mutants(results: list[Result]) -> Table:
    refusals = sorted({r["verdict"] for r in results} - {"accepted"})
    table = _table("mutants", "made", "equivalent", "of them refused", *refusals, "accepted", "s each")

    def row(of: list[Result]) -> list[str]:
        differ = [r for r in of if r["differs"]]
        alike = [r for r in of if not r["differs"]]
        verdicts = Counter(r["verdict"] for r in differ)
        refused = sum(r["verdict"] != "accepted" for r in alike)
        counts = [len(of), len(alike), refused, *(verdicts[v] for v in refusals), verdicts["accepted"]]
        return [*map(str, counts), _seconds(of)]

    return _filled(table, results, row)


def _rewrites(results: list[Result]) -> Table:
    refusals = sorted({r["verdict"] for r in results} - {"accepted"})
    table = _table("rewrites", "made", "passed", *refusals, "s each")

    def row(of: list[Result]) -> list[str]:
        verdicts = Counter(r["verdict"] for r in of)
        counts = [len(of), verdicts["accepted"], *(verdicts[v] for v in refusals)]
        return [*map(str, counts), _seconds(of)]

    return _filled(table, results, row)


def _table(first: str, *columns: str) -> Table:
    table = Table(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _filled(table: Table, results: list[Result], row: Callable[[list[Result]], list[str]]) -> Table:
    for kind in dict.fromkeys(sorted(r["kind"] for r in results)):
        table.add_row(kind, *row([r for r in results if r["kind"] == kind]))
    table.add_section()
    table.add_row("all", *row(results))
    return table


def _seconds(results: Iterable[Result]) -> str:
    spent = [sum(r["seconds"].values()) for r in results]
    return f"{sum(spent) / max(len(spent), 1):.2f}"


def _listed(console: Console, title: str, results: list[Result], field: str) -> None:
    if results:
        console.print(f"\n{len(results)} {title}:")
    for r in results:
        line = f"  {r['name']} / {r['kind']} / {r['seed']}: {r['words']}; {r[field]}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
