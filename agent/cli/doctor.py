"""``coda-agent doctor``: check everything that tracing, compiling, measuring and authoring need.

A finding is ``missing`` if this machine lacks something that some commands need, such as a GPU or a key. A
finding is ``broken`` if something is installed but does not work. Missing and broken findings have a remedy.
No secret is printed.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from coda_agent.agent import providers
from coda_agent.agent.extras import EXTRAS
from coda_agent.agent.finding import Finding, program, version_text
from coda_agent.primitives.system.files import ROOT, cache_dir
from coda_agent.primitives.target import TARGET

if TYPE_CHECKING:
    from rich.table import Table

    from coda_agent.primitives.lang.signature import Signature

PYTHON = (3, 11)
FREE_BYTES = 1 << 30  # required free space: tuning compiles hundreds of kernels, each of 0.1 MB
TOOLS = ("cuobjdump", "nvdisasm")
ELSEWHERE = "measure on a machine with an H100: coda-agent bundle, measure, import"
PROJECT = "coda-agent"
PYPROJECT = ROOT / "pyproject.toml"


def check() -> list[Finding]:
    """Run all checks. This takes a few seconds, mostly to import PyTorch."""
    return [
        python(),
        *packages(),
        *optional(),
        torch_build(),
        device(),
        *tools(),
        jail(),
        cache(),
        git(),
        *(spec.check() for spec in providers.specs().values() if spec.check),
    ]


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as data for ``--json``. ``healthy`` means that nothing is broken."""
    return {"healthy": healthy(findings), "findings": [asdict(f) for f in findings]}


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing is broken. Missing items are allowed, because the user may not need them."""
    return all(f.status != "broken" for f in findings)


def table(findings: Sequence[Finding]) -> Table:
    """One row per finding, with the remedy below the detail."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    made = Table(show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for f in findings:
        words = Text(f.detail)
        if f.remedy:
            words.append(f"\n{f.remedy}", style="italic")
        made.add_row(Text(f.name), Text(f.status, style=styles[f.status]), words)
    return made


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Check the interpreter's version."""
    said = ".".join(map(str, version))
    if version >= PYTHON:
        return Finding("python", "ok", f"{said} at {sys.executable}")
    wanted = ".".join(map(str, PYTHON))
    return Finding("python", "broken", f"{said}, too old", f"use Python {wanted} or later")


def requirements() -> list[Requirement]:
    """The packages that coda-agent declares in the checkout's pyproject.toml, or else in the metadata of the
    installed package."""
    if PYPROJECT.exists():
        declared = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        declared = importlib.metadata.requires(PROJECT) or []
    return [r for r in map(Requirement, declared) if r.marker is None or r.marker.evaluate()]


def packages() -> list[Finding]:
    """Check that each declared package is installed, in a version known to work."""
    try:
        return [package(r) for r in requirements()]
    except importlib.metadata.PackageNotFoundError:
        detail = f"{PROJECT} is neither installed nor a checkout"
        return [Finding("packages", "broken", detail, "pip install -e . in a checkout")]


def package(wanted: Requirement) -> Finding:
    """Check that one package is installed, in a version of the range ``wanted``."""
    remedy = f"pip install '{wanted}'"
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(wanted.name, "missing", "not installed", remedy)
    if not wanted.specifier.contains(found, prereleases=True):
        return Finding(wanted.name, "broken", f"{found}; needs {wanted.specifier}", remedy)
    return Finding(wanted.name, "ok", found)


def optional() -> list[Finding]:
    """Check that all packages of each user-facing extra are installed."""
    from importlib.util import find_spec

    found = []
    for extra in sorted(set(EXTRAS.values())):
        lacks = [name for name, of in EXTRAS.items() if of == extra and find_spec(name) is None]
        detail, remedy = f"not installed: {', '.join(lacks)}", f"pip install '{PROJECT}[{extra}]'"
        found.append(
            Finding(f"extra {extra}", *(("missing", detail, remedy) if lacks else ("ok", "installed")))
        )
    return found


def torch_build() -> Finding:
    """Check that PyTorch imports, and report its build."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return Finding("torch build", "missing", str(error), "pip install torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        remedy = "pip install --force-reinstall torch"
        return Finding("torch build", "broken", f"does not import: {error}", remedy)
    cuda = torch.version.cuda
    use = f"CUDA {cuda}" if cuda else "CPU only: kernels can be checked and compiled, but not measured"
    return Finding("torch build", "ok", f"{torch.__version__}, {use}")


def device() -> Finding:
    """Check the GPU that kernels would run on."""
    name = "CUDA device"
    driver, seen = _driver()
    try:
        import torch

        if torch.cuda.is_available():
            return judged_device(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), driver)
    except ImportError as error:
        return Finding(name, "missing", f"cannot check: {error}", "install torch first")
    except (OSError, RuntimeError) as error:  # RuntimeError: the driver refused to create a context
        words = str(error).partition("\n")[0]
        return Finding(name, "broken", words, "run nvidia-smi: the driver must be loaded, and the GPU free")
    if seen:
        detail = f"driver {driver} sees {seen}, but PyTorch {torch.__version__} cannot use it"
        return Finding(name, "broken", detail, "install a CUDA build of PyTorch that this driver supports")
    return Finding(name, "missing", "no GPU: kernels can be checked, but not measured", ELSEWHERE)


def judged_device(gpu: str, capability: tuple[int, int], driver: str) -> Finding:
    """Check that this GPU is a Hopper GPU, because only Hopper runs sm_90a code."""
    detail = f"{gpu}, driver {driver}, capability {capability[0]}.{capability[1]}"
    if capability == TARGET.capability:
        return Finding("CUDA device", "ok", detail)
    needed = "kernels need capability {}.{} (Hopper)".format(*TARGET.capability)
    return Finding("CUDA device", "missing", f"{detail}: {needed}", ELSEWHERE)


def _driver() -> tuple[str, str]:
    """The driver's version and the first GPU's name, found without PyTorch. If the driver does not answer,
    the result is "unknown" and ""."""
    try:
        import pynvml
    except ImportError:
        return "unknown", ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "unknown", ""
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        return driver, str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))) if count else ""
    except pynvml.NVMLError:
        return "unknown", ""
    finally:
        pynvml.nvmlShutdown()


def tools() -> list[Finding]:
    """Check the CUDA binary tools that the resource report uses."""
    from importlib.util import find_spec

    spec = find_spec("triton")  # finds the package without importing it
    if spec is None or spec.origin is None:
        detail = "the triton package, which contains it, is not installed"
        return [Finding(t, "missing", detail, "pip install triton") for t in TOOLS]
    return [tool(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / t) for t in TOOLS]


def tool(path: Path) -> Finding:
    """Check that a tool runs, by asking for its version."""
    if not path.exists():
        return Finding(
            path.name, "missing", f"not found: {path}", "pip install -U triton (a build for NVIDIA)"
        )
    try:
        said = version_text(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(path.name, "broken", f"{path}: {error}", "pip install --force-reinstall triton")
    version = re.search(r"release ([\w.]+)", said)
    return Finding(path.name, "ok", f"release {version[1]}" if version else str(path))


_TINY = """
from primitives import gemm, kernel

@kernel
def tiny(a, b):
    return {"c": gemm(a, b)}
"""


def jail() -> Finding:
    """Trace a tiny kernel in the real jail; report the active layers and the time."""
    try:
        from coda_agent.verifier.report import Rejected
        from coda_agent.verifier.sandbox import jail as real
    except ModuleNotFoundError as error:
        return Finding("jail", "missing", f"cannot start: {error}", f"pip install {error.name}")
    try:
        traced = real.trace(_TINY, _tiny_signature())
    except real.JailUnavailable as error:
        return Finding("jail", "broken", str(error), "use Linux 5.13 or later, with Landlock or seccomp")
    if isinstance(traced, Rejected):
        return Finding(
            "jail",
            "broken",
            f"the jail rejected a correct kernel ({traced.code}): {traced.message}",
            "report this bug with the output of coda-agent doctor --json",
        )
    lacks = f"; this system lacks {', '.join(traced.missing)}" if traced.missing else ""
    return Finding(
        "jail", "ok", f"{', '.join(traced.layers)}{lacks}; {traced.seconds * 1e3:.0f} ms per trace"
    )


def _tiny_signature() -> Signature:
    from coda_agent.primitives.lang.dims import Dim
    from coda_agent.primitives.lang.signature import Signature, TensorType

    def matrix(*shape: str) -> TensorType:
        return TensorType(tuple(map(Dim.parse, shape)), "bf16")

    inputs = {"a": matrix("M", "K"), "b": matrix("K", "N")}
    return Signature("tiny", ("M", "K", "N"), inputs, {"c": matrix("M", "N")})


def cache() -> Finding:
    """Check the cache directory: it exists, is writable and has free space."""
    path = cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"doctor")
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(
            "cache",
            "broken",
            f"cannot write to {path}: {error.strerror or error}",
            "set CODA_AGENT_CACHE to a directory that you can write to",
        )
    room = f"{free / (1 << 30):.1f} GiB free"
    if free < FREE_BYTES:
        return Finding(
            "cache",
            "broken",
            f"{path}: only {room}",
            f"free {FREE_BYTES >> 30} GiB there, or set CODA_AGENT_CACHE to a larger disk",
        )
    return Finding("cache", "ok", f"{path}, {room}")


def git() -> Finding:
    """Check git, which commits accepted kernels."""
    without = "accepted kernels cannot be committed"
    return program("git", "git", without, "install git", "reinstall git")
