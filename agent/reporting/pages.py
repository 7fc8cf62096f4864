"""Render HTML pages from the folder ``templates``. All values are escaped for HTML, and ``safe_text.visible``
escapes characters that a page would not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from coda_agent.agent.terminal.safe_text import visible


def page(template: str, **values: object) -> str:
    """Render a whole page as one self-contained file."""
    return _ENVIRONMENT.get_template(template).render(values)


def macro(name: str, *values: object) -> Markup:
    """Render an element with a macro from ``macros.html``."""
    module: Any = _ENVIRONMENT.get_template("macros.html").module
    return getattr(module, name)(*values)


def _escaped(value: object) -> object:
    return value if isinstance(value, Markup) else visible(str(value))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    finalize=_escaped,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
