"""``python -m cheats.raw.compiler SCRATCH`` compiles edited texts as a compile worker does, one text per line
of input. On request it skips the language check. It prints the result of each text, and what the text's child
left behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cheats.child import children
from coda_agent.primitives import raw
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lowered import GemmKernel, VectorKernel
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.raw import child
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.raw.language import check
from coda_agent.primitives.raw.objects import inspect

SMALL = Schedule(128, 128, False, 1, 1)


def compiled(work: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Compile one kernel of the text, on a schedule that compiles fast; return the object's size or the
    error."""
    lowered = KernelSource(Program.from_json(work["program"]), edited=work["text"]).lowered
    kernels: list[GemmKernel | VectorKernel] = [*lowered.gemms, *lowered.vectors]
    kernel = next(k for k in kernels if k.name == work["kernel"])
    schedule = SMALL if isinstance(kernel, GemmKernel) else None
    found = check if work["checked"] else lambda text, names: None
    try:
        with patch.object(raw, "check", found), patch.object(child, "SECONDS", work["seconds"]):
            _, data = raw._compile_confined(raw.Wanted(lowered, kernel, schedule, {}), scratch)
        return {"cubin": len(inspect(data))}
    except RawError as error:
        return {"code": error.code, "message": error.message, "line": error.line}
    finally:
        child.empty(scratch)


def main(scratch: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    raw._import_compilers()
    for line in sys.stdin:
        descriptors = set(os.listdir("/proc/self/fd"))
        found = compiled(json.loads(line), scratch)
        found["children"] = sorted(children())
        found["files"] = [path.name for path in scratch.iterdir()]
        found["descriptors"] = sorted(set(os.listdir("/proc/self/fd")) - descriptors)
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
