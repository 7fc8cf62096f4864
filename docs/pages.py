"""A hook of mkdocs: pages that are made from the code and from files outside ``docs/``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from coda_agent.agent.cli.main import app
from coda_agent.primitives.system.markdown_table import markdown_table

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Add the commands' page and CONTRIBUTING.md."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=contributing))
    files.append(File.generated(config, "commands.md", content=commands()))
    return files


def commands() -> str:
    """Each command with its arguments and options, as ``--help`` has them."""
    group: Any = typer.main.get_command(app)
    parts = ["# Commands\n", f"{group.help}\n"]
    for name, command in sorted(_leaves(group, "coda-agent")):
        table = markdown_table(("argument", "meaning"), map(_parameter, command.params))
        parts += [f"## `{name}`\n", f"{_prose(command.help)}\n", table]
    return "\n".join(parts)


def _leaves(group: Any, path: str) -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        here = f"{path} {name}"
        if hasattr(command, "commands"):
            found += [*([(here, command)] if command.invoke_without_command else []), *_leaves(command, here)]
        else:
            found.append((here, command))
    return found


def _parameter(parameter: Any) -> tuple[str, str]:
    if parameter.param_type_name == "argument":
        words = f"`{(parameter.metavar or parameter.name).upper().replace('|', ' or ')}`"
    else:
        words = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.default if isinstance(parameter.default, (int, float, str)) else None
    shown = f" (default: `{default}`)" if default not in (None, "", False) else ""
    return words, _prose(getattr(parameter, "help", "") or "") + shown


def _prose(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("<", "&lt;")).strip()
