"""Find a complete CUDA toolkit and the driver's library, for libraries that build their kernels at run time.
Importing this module imports nothing heavy."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from coda_agent.primitives.system.files import cache_dir

TOOLKITS = Path("/usr/local")  # has cuda, cuda-13.0, ...
DRIVERS = tuple(map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/nvidia/lib64")))
WORDS = 250  # characters of a failed build's message to keep
BUILD = "Ninja build failed"


@cache
def prepare() -> None:
    """Prepare the environment before FlashInfer is imported. FlashInfer assumes that the folder above the
    first nvcc is the toolkit. The assumption is wrong if that nvcc is a wrapper. FlashInfer also asks the
    linker for a libcuda.so, which may be in a folder that the linker does not search."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    # ninja is in the folder of this interpreter, which PATH lacks if the environment is not active
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    )
    given = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    home = toolkit([*given, *installed(TOOLKITS)])
    if home is not None:
        os.environ["CUDA_HOME"] = str(home)
    stubs = [home / "lib64" / "stubs"] if home is not None else []
    driver = library([*stubs, *DRIVERS], cache_dir() / "libcuda")
    if driver is not None:
        paths = [str(driver), *filter(None, [os.environ.get("LIBRARY_PATH")])]
        os.environ["LIBRARY_PATH"] = os.pathsep.join(paths)


def installed(root: Path) -> list[Path]:
    """The toolkits in a folder, newest first. A toolkit whose name has no number comes last."""

    def number(path: Path) -> list[int]:
        return [int(digits) for digits in re.findall(r"\d+", path.name)]

    return sorted(root.glob("cuda*"), key=number, reverse=True)


def toolkit(candidates: Iterable[Path]) -> Path | None:
    """The first toolkit with a compiler and a runtime library to link."""
    wanted = ("bin/nvcc", "lib64/libcudart.so")
    return next((home for home in candidates if all((home / each).exists() for each in wanted)), None)


def library(folders: Iterable[Path], own: Path) -> Path | None:
    """Return the first folder that contains libcuda.so. If the folders have only libcuda.so.1, create the
    folder ``own`` with a link libcuda.so to that file, and return ``own``. Return None if no folder has
    either file."""
    folders = list(folders)
    for folder in folders:
        if (folder / "libcuda.so").exists():
            return folder
    for folder in folders:
        if (folder / "libcuda.so.1").exists():
            own.mkdir(parents=True, exist_ok=True)
            link = own / "libcuda.so"
            link.unlink(missing_ok=True)
            link.symlink_to(folder / "libcuda.so.1")
            return own
    return None


def last_words(said: str) -> str:
    """The end of a build's output on one line, because errors come last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith("ninja: build stopped")] or lines
    while len(" | ".join(told)) > WORDS and len(told) > 1:
        told = told[1:]
    return " | ".join(told)[-WORDS:]
