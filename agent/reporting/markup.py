"""HTML that cannot be broken by what it shows: `element` escapes all text but its own markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from coda_agent.agent.reporting.safe_text import visible

__all__ = ["Html", "code", "details", "document", "element", "facts", "table"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # were escaping to fail, still nothing would run


class Html(str):
    """Text that is markup; any other string is text to be escaped."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str | float) -> Html:
    """``<name>children</name>``; an attribute ``class_`` is class, ``aria_label`` is aria-label."""
    given = "".join(f' {k.rstrip("_").replace("_", "-")}="{_text(str(v))}"' for k, v in attributes.items())
    return Html(f"<{name}{given}>{''.join(map(_text, children))}</{name}>")


def _text(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(visible(text))


def code(*parts: str) -> Html:
    # Focusable, as a keyboard scrolls what is wider than the page.
    return element("pre", element("code", *parts), tabindex=0)


def details(summary: str, *children: str) -> Html:
    """Collapsed until it is asked for."""
    return element("details", element("summary", summary), *children)


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    return element("dl", *(element("div", element("dt", k), element("dd", v)) for k, v in pairs))


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table whose first column names the rows."""
    head = element("tr", *(element("th", heading, scope="col") for heading in headings))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in rest))
        for first, *rest in rows
    ]
    parts = (element("caption", caption), element("thead", head), element("tbody", *body))
    return element("div", element("table", *parts), class_="wide", tabindex=0)


def document(title: str, *body: str) -> str:
    """A whole page, of one file."""
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{element("title", title)}
<style>{_STYLE}</style>
</head>
<body>
{element("main", *body)}
</body>
</html>
"""


_STYLE = """
:root {
  --page: #fff; --ink: #1b1f24; --dim: #59636e; --soft: #f4f5f7; --line: #d5d9df;
  --good: #14713d; --fair: #0a6c8f; --bad: #b3261e; --plus: #dcf5e2; --minus: #fde3e0;
  --prompt: #80868f; --answer: #3f7fd9; --draft: #9a6bd0; --report: #2a9d6f; --piece: #c9a227;
  --measurement: #d9772b; --void: #cc4a40; --other: #b5729b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e4e7eb; --dim: #9aa4af; --soft: #1d2126; --line: #363c44;
    --good: #5fce8c; --fair: #5cc0e4; --bad: #ff8a80; --plus: #17381f; --minus: #451f1d;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1, h2, h3, li, figcaption, summary { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
pre, code { font: 13px/1.45 ui-monospace, monospace; }
pre { margin: .4rem 0; padding: .7rem; overflow-x: auto; background: var(--soft); border-radius: 6px; }
.words { white-space: pre-wrap; overflow-wrap: anywhere; }
.add { background: var(--plus); } .del { background: var(--minus); } .hunk, .dim { color: var(--dim); }
.accepted, .passed { color: var(--good); } .checked { color: var(--fair); }
.rejected, .unmeasured { color: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(14rem, 100%), 1fr));
  gap: .5rem 1.5rem; margin: .6rem 0; }
dt { color: var(--dim); font-size: .85rem; } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .4rem 0; } summary { cursor: pointer; } summary, a { color: var(--fair); }
.wide { max-width: 100%; overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); padding-bottom: .2rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; white-space: pre-line;
  border-bottom: 1px solid var(--line); }
td span { white-space: nowrap; }
thead th { color: var(--dim); font-weight: normal; } tbody th { font-weight: 600; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; }
.legend span { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
svg { display: block; width: 100%; height: auto; margin: .4rem 0; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .dim { fill: var(--dim); }
svg .rule { stroke: var(--line); } svg .arm { fill: var(--prompt); } svg .candidate { fill: var(--answer); }
svg .roofline { stroke: var(--void); stroke-width: 2; stroke-dasharray: 5 3; } svg .cut { opacity: .35; }
""" + "".join(
    f".{kind} {{ fill: var(--{kind}); }} span.{kind} {{ background: var(--{kind}); }}\n"
    for kind in ("prompt", "answer", "draft", "report", "piece", "measurement", "void", "other")
)
