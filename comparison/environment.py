"""The separate environment of CODA's own package, which pins other versions of QuACK and CuTeDSL.

All other packages, above all PyTorch, come from the current environment. The paths of the separate
environment are absolute. So on another machine ``install`` must set the paths again, but it can do so without
a package index.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import sysconfig
import venv
from functools import cache
from pathlib import Path

from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.system.files import cache_dir
from coda_agent.primitives.system.subprocesses import output

PACKAGE = "coda-kernels==0.2"
SAID = 1000  # an error quotes this many characters from the end of pip's output
# The new environment uses the pip of the current environment, because Debian's Python lacks ensurepip.
_OWN_PIP = importlib.util.find_spec("pip") is not None
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
_VERSIONS = """
import importlib.metadata as m, json, sys
print(json.dumps({name: next((d.version for d in m.distributions(name=name)), "") for name in sys.argv[1:]}))
"""


def folder() -> Path:
    """The environment's folder, whether it exists or not."""
    python = ".".join(map(str, sys.version_info[:2]))
    return cache_dir() / "environments" / f"{PACKAGE.replace('==', '-')}-python{python}"


def python() -> str | None:
    """The interpreter of the environment, or None if the environment is not installed. ``versions`` tells
    whether the interpreter works."""
    ready = folder() / "ready"
    return _interpreter() if ready.exists() else None


def install() -> str:
    """Create the environment with pip's configured index, and return its interpreter. If the environment
    exists, update it to the current interpreter and packages, and add missing packages with pip. Raises
    InvalidInput."""
    place, made = folder(), _interpreter()
    there = (place / "ready").exists()
    try:
        for other in place.glob("bin/python*") if there else ():  # a link may lead to a missing interpreter
            other.unlink()
        venv.create(place, clear=not there, with_pip=not there and not _OWN_PIP)
        borrowed = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        # a name that sorts last, so that the environment's own packages come first
        (Path(output(made, "-c", _PURELIB).strip()) / "zz-borrowed.pth").write_text(borrowed)
        pip = [sys.executable, "-m", "pip", "--python", made] if _OWN_PIP else [made, "-m", "pip"]
        # no --quiet, because it would keep pip from naming conflicting packages
        filled = [*pip, "install", "--disable-pip-version-check", "--no-input", "--progress-bar=off", PACKAGE]
        output(*filled, stderr=subprocess.STDOUT)
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
        raise InvalidInput(
            f"{place}: {PACKAGE} could not be installed: {words.strip()[-SAID:]}; without it "
            "coda-agent compare measures every other column"
        ) from None
    (place / "ready").touch()
    return made


@cache
def versions(interpreter: str, packages: tuple[str, ...]) -> dict[str, str] | str:
    """The versions of packages in that interpreter's environment. If the environment is unusable, the result
    is a text that says why, and how to repair the environment."""
    remedy = "coda-agent compare --install repairs it"
    try:
        found: dict[str, str] = json.loads(output(interpreter, "-c", _VERSIONS, *packages))
    except OSError as error:
        return f"its environment does not run, {interpreter}: {error.strerror}: {remedy}"
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if "rror: " in line]
        why = said[-1] if said else f"exit status {error.returncode}"
        return f"its environment does not run, {interpreter}: {why}: {remedy}"
    lacking = [name for name, number in found.items() if not number]
    return f"{interpreter} finds no {' and no '.join(lacking)}: {remedy}" if lacking else found


def _interpreter() -> str:
    return str(folder() / "bin" / "python")
