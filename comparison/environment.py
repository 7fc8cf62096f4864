"""An environment of its own for CODA's package, whose QuACK and CuTeDSL are not those of this project.

Everything else in it, PyTorch above all, is borrowed from the environment that this runs in. Its paths are
absolute: where it was carried to another machine, ``install`` there sets them anew, without an index.
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

from coda_agent.comparison.results import ResultsError
from coda_agent.primitives.system.files import cache_dir

PACKAGE = "coda-kernels==0.2"
SAID = 1000  # characters of what pip said last
# Of this environment, which needs no bootstrap in the other: Debian's Python has none to give.
_OWN_PIP = importlib.util.find_spec("pip") is not None
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
_VERSIONS = """
import importlib.metadata as m, json, sys
print(json.dumps({name: next((d.version for d in m.distributions(name=name)), "") for name in sys.argv[1:]}))
"""


def folder() -> Path:
    """Where it is, or would be."""
    python = ".".join(map(str, sys.version_info[:2]))
    return cache_dir() / "environments" / f"{PACKAGE.replace('==', '-')}-python{python}"


def python() -> str | None:
    """Its interpreter, once it is installed; whether it runs is for ``versions`` to say."""
    ready = folder() / "ready"
    return _interpreter() if ready.exists() else None


def install() -> str:
    """Make it, with whatever index pip is set up with; its interpreter. One that is there is set on this
    interpreter and these packages, and pip adds what it lacks. Raises ResultsError."""
    place, made = folder(), _interpreter()
    there = (place / "ready").exists()
    try:
        for other in place.glob("bin/python*") if there else ():  # a link may lead to what is not here
            other.unlink()
        venv.create(place, clear=not there, with_pip=not there and not _OWN_PIP)
        borrowed = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (Path(_said(made, "-c", _PURELIB).strip()) / "zz-borrowed.pth").write_text(borrowed)  # after its own
        pip = [sys.executable, "-m", "pip", "--python", made] if _OWN_PIP else [made, "-m", "pip"]
        # Of packages that go ill together pip says which and why on its standard output, unless it is quiet.
        filled = [*pip, "install", "--disable-pip-version-check", "--no-input", "--progress-bar=off", PACKAGE]
        _said(*filled, stderr=subprocess.STDOUT)
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
        raise ResultsError(
            f"{place}: {PACKAGE} could not be installed: {words.strip()[-SAID:]}; without it "
            "coda-agent compare measures every other column"
        ) from None
    (place / "ready").touch()
    return made


@cache
def versions(interpreter: str, packages: tuple[str, ...]) -> dict[str, str] | str:
    """Of distributions in that environment; or why it cannot be used, and what to do."""
    remedy = "coda-agent compare --install mends it"
    try:
        found: dict[str, str] = json.loads(_said(interpreter, "-c", _VERSIONS, *packages))
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


def _said(*command: str, stderr: int = subprocess.PIPE) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True).stdout
