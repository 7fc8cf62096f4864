"""An environment of its own for CODA's package, whose QuACK and CuTeDSL are not those of this project.

Everything else in it, PyTorch above all, is borrowed from the environment that this runs in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from functools import cache
from pathlib import Path

from agent.compare.results import ResultsError
from primitives.files import cache_dir

PACKAGE = "coda-kernels==0.2"
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
_VERSIONS = """
import importlib.metadata as m, json, sys
print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))
"""


def folder() -> Path:
    """Where it is, or would be."""
    python = ".".join(map(str, sys.version_info[:2]))
    return cache_dir() / "environments" / f"{PACKAGE.replace('==', '-')}-python{python}"


def python() -> str | None:
    """Its interpreter, once it is installed."""
    ready = folder() / "ready"
    return str(folder() / "bin" / "python") if ready.exists() else None


def install() -> str:
    """Make it, with whatever index pip is set up with; its interpreter. Raises ResultsError."""
    if there := python():
        return there
    place = folder()
    try:
        venv.create(place, clear=True, with_pip=True)
        made = str(place / "bin" / "python")
        borrowed = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (Path(_said(made, "-c", _PURELIB).strip()) / "zz-borrowed.pth").write_text(borrowed)  # after its own
        _said(made, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", PACKAGE)
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        raise ResultsError(
            f"{place}: {PACKAGE} could not be installed: {words.strip()[-500:]}; without it "
            "coda-agent compare measures every other column"
        ) from None
    (place / "ready").touch()
    return made


@cache
def versions(interpreter: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Of distributions in that environment."""
    found: dict[str, str] = json.loads(_said(interpreter, "-c", _VERSIONS, *packages))
    return found


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
