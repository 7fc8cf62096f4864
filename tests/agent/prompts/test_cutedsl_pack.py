"""The CuTeDSL pack is part of the prompt for authors who edit lowered text. It is small enough, names only
things that exist in the installed packages, and has examples that compile for sm_90a."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from authoring import KERNELS, SHIPPED
from checkout import PYTHONPATH, ROOT
from kernels import signature, tensor, trace

from coda_agent.agent.prompts.prompt import tokens
from coda_agent.primitives.compiler.lower import lower

pytestmark = pytest.mark.slow

PACK = ROOT / "agent" / "prompts" / "pack" / "cutedsl.md"
TEXT = PACK.read_text(encoding="utf-8")
MOST = 14_000  # tokens
DEVICE = [p for p in sorted((ROOT / "primitives" / "device").glob("*.py")) if p.stem != "__init__"]
DOTTED = re.compile(r"(?<![\w./])((?:cute|cutlass|quack|primitives)(?:\.[A-Za-z_]\w*)+)")
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

TOY = trace(
    signature(
        {"x": tensor("M, K"), "w": tensor("N, K"), "bias": tensor("N", "fp32")},
        {"a": tensor("M, N"), "b": tensor("M, N"), "s": tensor("N", "fp32")},
    ),
    "h = gemm(x, w.mT) + per_column(bias)",
    "d = 1 + abs(h)",
    "return {'a': h / d, 'b': 1 / d, 's': column_sums(h)}",
)
SUFFIX = f"_{lower(TOY).hash[:12]}"
GIVEN = lower(TOY).text.replace(SUFFIX, "")  # the text that the author of an edit sees
WHOLE, *SNIPPETS = FENCED.findall(TEXT)
QUOTIENTS, COLUMNS = (SNIPPETS[0], SNIPPETS[1]), (SNIPPETS[2], SNIPPETS[3])

# One process does everything that needs the DSL, because the DSL's imports take seconds.
CHILD = """
import importlib, json, pathlib, sys
from dataclasses import replace
names, step, finish = json.load(sys.stdin)
def missing(name):
    head, *rest = name.split(".")
    found = importlib.import_module({"cute": "cutlass.cute"}.get(head, head))
    for part in rest:
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except (AttributeError, ImportError):
                return True
    return False
from coda_agent.primitives.frozen_names import frozen_names
with frozen_names():
    answer = {"missing": [name for name in names if missing(name)]}
from coda_agent.primitives.compiler import cubin as cubins
from coda_agent.primitives.lang.ir import Schedule
from coda_agent.primitives.compiler.jit import compile_kernel
from coda_agent.primitives.compiler.lower import lower
from test_cutedsl_pack import SUFFIX, TOY
own = lower(TOY)
def sass(example, text, kernel, schedule):
    edited = replace(own, text=text, hash=f"{example}{own.hash}")
    compiled(example, edited, replace(kernel, name=kernel.name.removesuffix(SUFFIX)), schedule)
def compiled(example, lowered, kernel, schedule):
    compile_kernel(lowered, kernel, schedule, {})
    (cubin,) = pathlib.Path.cwd().rglob("*.cubin")
    answer[example] = cubins.tool("nvdisasm", "-c", str(cubin))
    cubin.unlink()
sass("step", step, own.gemms[0], Schedule(128, 128, True, 2, 1))
sass("finish", finish, own.vectors[0], None)
compiled("own finish", own, own.vectors[0], None)
print(json.dumps(answer))
"""
NAMES = sorted(set(DOTTED.findall(TEXT)))
INVENTED = ["cute.arch.no_such_thing", "primitives.device.no_such_module"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the names that do not exist (``missing``) and the SASS of three kernels. Two kernels are edited
    as in the pack's examples (``step`` and ``finish``). The third kernel is the toy's own finishing kernel
    (``own finish``)."""
    scratch = tmp_path_factory.mktemp("pack")
    environment = os.environ | {
        "CODA_AGENT_CACHE": str(scratch),
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_DUMP_DIR": str(scratch),
        "CUTE_DSL_KEEP_CUBIN": "1",
        "PYTHONPATH": os.pathsep.join(
            [PYTHONPATH, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
        "QUACK_ARCH": "90",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([[*NAMES, *INVENTED], edited(QUOTIENTS), edited(COLUMNS)]),
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def edited(edit: tuple[str, str]) -> str:
    before, after = edit
    assert GIVEN.count(before) == 1
    return GIVEN.replace(before, after)


# size and packaging


def test_the_size() -> None:
    assert tokens(TEXT) < MOST


def test_it_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["coda_agent.agent.prompts"]
    assert any(PACK in (ROOT / "agent" / "prompts").glob(pattern) for pattern in patterns)


# the names in the pack exist


def test_every_dotted_name_exists(compiled: dict[str, Any]) -> None:
    assert {"cute.arch.griddepcontrol_wait", "quack.activation.sigmoid", "cutlass.select_"} <= set(NAMES)
    assert compiled["missing"] == INVENTED


@pytest.mark.parametrize("module", DEVICE, ids=lambda path: path.stem)
def test_all_that_a_device_module_offers_is_named(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    (exported,) = [
        ast.literal_eval(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    ]
    assert [name for name in exported if not re.search(rf"\b{name}\b", TEXT)] == []


# the worked examples


def test_the_toy_is_what_lowering_gives() -> None:
    assert WHOLE.strip() == GIVEN.strip()


def test_the_first_example_compiles_to_what_it_claims(compiled: dict[str, Any]) -> None:
    found = compiled["step"]
    assert len(re.findall(r"\bMUFU\.RCP\b", found)) == 128
    assert not re.findall(r"\b(?:CALL|FFMA)\b", found)
    assert len(re.findall(r"\bHGMMA\b", found)) > 0


def test_a_gemm_signals_and_a_finishing_kernel_waits_before_it_touches_memory(
    compiled: dict[str, Any],
) -> None:
    assert re.findall(r"\b(ACQBULK|PREEXIT)\b", compiled["step"]) == ["ACQBULK", "PREEXIT"]
    order = re.findall(r"\b(ACQBULK|LDG|STG|PREEXIT)\b", compiled["own finish"])
    assert order[0] == "ACQBULK" and order.count("ACQBULK") == 1 and {"LDG", "STG"} == set(order[1:])


def test_the_second_example_compiles_to_what_it_claims(compiled: dict[str, Any]) -> None:
    found = compiled["finish"]
    order = re.findall(r"\b(ACQBULK|LDG|BAR)\b", found)
    assert order[0] == "ACQBULK" and order.count("LDG") == 4 and order[-1] == "BAR"


# the pack contains no part of an accepted kernel


def test_it_names_no_spec() -> None:
    assert not [name for name in SHIPPED if name in TEXT]


def test_no_line_of_an_accepted_kernel_is_in_it() -> None:
    lines = {line.strip() for line in TEXT.splitlines()}
    own = {line for path in AUTHORED for line in map(str.strip, read(path)) if telling(line)}
    assert len(own) > 50
    assert not own & lines


def test_no_arithmetic_of_an_accepted_kernel_is_in_it() -> None:
    """The pack must not contain three consecutive operations that occur in only one or two accepted kernels.
    Single operations do not count, because lowering writes them into every kernel."""
    kernels = [arithmetic(read(path)) for path in LOWERED]
    seen = Counter(three for kernel in kernels for three in kernel)
    own = {three for three, count in seen.items() if count <= 2}
    assert len(own) > 100
    assert not own & arithmetic(TEXT.splitlines())


LOWERED = sorted(KERNELS.glob("*.cutedsl.py"))
EDITED = sorted(KERNELS.glob("*.raw.py"))  # excluded: their authors used lines of the pack
AUTHORED = sorted(set(KERNELS.glob("*.py")) - {*LOWERED, *EDITED})


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def arithmetic(lines: list[str]) -> set[tuple[str, ...]]:
    """Return all sequences of three consecutive operations in ``lines``. The numbers of nodes are removed."""
    plain = [re.sub(r"\b([a-z])\d+(_\d)?\b", r"\1", line.strip()) for line in lines]
    operations = [line for line in plain if line.startswith("n = ")]
    return set(zip(operations, operations[1:], operations[2:], strict=False))


def telling(line: str) -> bool:
    """Return whether a line computes something and has more than 12 characters."""
    try:
        tree = ast.parse(line)
    except SyntaxError:
        return False
    kinds = (ast.Call, ast.BinOp, ast.Compare)
    return len(line.replace(" ", "")) > 12 and any(isinstance(node, kinds) for node in ast.walk(tree))
