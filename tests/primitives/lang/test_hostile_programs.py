"""Reading a hostile program in JSON raises ProgramError, or returns exactly the program that the JSON
describes. No other error is raised, and both time and memory stay small."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
from checkout import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret, solve_sizes, torch_dtype
from coda_agent.primitives.lang.ir import MAX_BYTES, OPERATIONS, Program
from coda_agent.primitives.runtime.launchable import sorted_rows

pytestmark = pytest.mark.slow

MARK = "zq"  # the prefix of every name in a hostile program; the product's own text never contains it
Json = Any


def marked(text: str) -> Json:
    """Return the program's JSON data with every name replaced except the names of operations."""
    data = json.loads(text)
    signature = data["signature"]
    names = [signature["name"], *signature["dims"], *signature["inputs"], *signature["outputs"]]
    new = {name: f"{MARK}{i}" for i, name in enumerate([*names, *signature["constants"]])}

    def named(text: str) -> str:
        return re.sub(r"[A-Za-z]\w*", lambda m: new[m[0]], text)

    def keys(table: dict[str, Json]) -> dict[str, Json]:
        return {new[k]: v for k, v in table.items()}

    for tensors in (signature["inputs"], signature["outputs"]):
        for tensor in tensors.values():
            tensor["shape"] = [named(d) for d in tensor["shape"]]
    data["signature"] = signature | {
        "name": new[signature["name"]],
        "dims": [new[d] for d in signature["dims"]],
        "static": [new[d] for d in signature["static"]],
        "inputs": keys(signature["inputs"]),
        "outputs": keys(signature["outputs"]),
        "constants": keys(signature["constants"]),
        "updates": {new[k]: new[v] for k, v in signature["updates"].items()},
    }
    data["nodes"] = [[op, a, named(name) if isinstance(name, str) else name] for op, a, name in data["nodes"]]
    return data | {"outputs": keys(data["outputs"]), "schedule": {}}


PROGRAMS = [marked(p.read_text()) for p in sorted((ROOT / "generated_kernels").glob("*.program.json"))]
VALUES: list[Json] = [
    None, True, 0, -1, 1, 511, 10**30, 1.5, 1e308, "", "__import__('zq')", "zq'\"\n", "\ud800", "\u202e",
    "zq" * 3000, [], {}, [[]], {"zq": 1}, ["float", "nan"], ["float", "inf"], ["float", "0x1p9999"],
    ["float", "-0x0p+0"], ["float", "0x1p-1074"], "zq1*zq1", "(" * 40, "9" * 79, "zq0 + -1", "fp32", "bf16",
    "int64", {"0": {"tile_m": 256}}, *sorted(OPERATIONS),
]  # fmt: skip
TOKENS = ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 5000, '"\ud800"', '{"a":1,"a":1}', "\x00", "tru")


def places(value: Json, path: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """Yield the paths of ``value`` and of all values inside it."""
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from places(child, (*path, key))


def at(data: Json, path: Sequence[int | str]) -> Json:
    for key in path:
        data = data[key]
    return data


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Draw the JSON text of a real program with a few changes, and sometimes with an invalid token."""
    data = deepcopy(draw(st.sampled_from(PROGRAMS)))
    for _ in range(draw(st.integers(0, 2))):  # changes after which the JSON may still be a valid program
        index = draw(st.integers(0, len(data["nodes"]) - 1))
        node = data["nodes"][index]
        if node[1] and draw(st.booleans()):
            node[1][draw(st.integers(0, len(node[1]) - 1))] = draw(st.integers(0, index - 1))
        elif node[1]:
            node[0] = draw(st.sampled_from(sorted(OPERATIONS)))
    for _ in range(draw(st.integers(0, 3))):
        spots = [path for path in places(data) if path]
        *parents, key = draw(st.sampled_from(spots))
        holder: Any = at(data, parents)
        match draw(st.sampled_from(("value", "number", "copy", "twice", "gone"))):
            case "value":
                holder[key] = deepcopy(draw(st.sampled_from(VALUES)))
            case "number":
                holder[key] = draw(st.integers(0, 40))
            case "copy":
                holder[key] = deepcopy(at(data, draw(st.sampled_from(spots))))
            case "twice" if isinstance(holder, list):
                holder.append(holder[draw(st.integers(0, len(holder) - 1))])
            case _:
                del holder[key]
    text = json.dumps(data, ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(st.sampled_from(TOKENS)) + text[start + draw(st.integers(0, 3)) :]
    return text


def outcome(text: str) -> str:
    """Return the last stage that the program reaches: refused, not lowered, lowered or interpreted. Any error
    except ProgramError is a bug in the product."""
    start = time.process_time()
    try:
        program = Program.from_json(text)
        assert Program.from_json(program.to_json()) == program
        said = json.loads(text)
        assert [[n.op, list(n.args)] for n in program.nodes] == [node[:2] for node in said["nodes"]]
        assert program.outputs == said["outputs"]
        assert list(program.signature.inputs) == list(said["signature"]["inputs"])
    except ProgramError:
        return "refused"
    finally:
        # without size limits, reading a hostile program would take minutes; with them, it may take a second
        # on a busy machine
        assert time.process_time() - start < 10
    try:
        assert MARK not in lower(program).text
    except ProgramError:
        return "not lowered"
    return "lowered" if not interpreted(program) else "interpreted"


def interpreted(program: Program) -> bool:
    """Return whether the program runs on small inputs. Every dim is 8. Return False if this makes an extent
    smaller than 1 or larger than 512."""
    import torch

    sizes = dict.fromkeys(program.signature.dims, 8)
    shapes = {name: [d(sizes) for d in t.shape] for name, t in program.signature.inputs.items()}
    outputs = [d(sizes) for t in program.signature.outputs.values() for d in t.shape]
    if not all(0 < n <= 512 for n in [*outputs, *(n for shape in shapes.values() for n in shape)]):
        return False
    try:
        solve_sizes(program.signature, shapes)
    except ValueError:  # some dim does not follow from the inputs' shapes
        return False
    inputs = {k: torch.ones(shapes[k]).to(torch_dtype(t.dtype)) for k, t in program.signature.inputs.items()}
    for name, rows in sorted_rows(program):  # all rows belong to the first expert
        inputs[name][:1], inputs[name][1:] = 0, rows(sizes)
    try:
        interpret(program, inputs)
    except ProgramError:
        return False
    return True


def test_hostile_programs_are_refused_or_mean_what_they_say() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(programs())
    def judge(text: str) -> None:
        seen[outcome(text)] += 1

    judge()
    assert seen["refused"] > 50 and seen["interpreted"] > 20, seen


def grown(count: int) -> str:
    """Return the JSON of a real program. It is extended to ``count`` nodes by applying ``exp`` repeatedly."""
    data = deepcopy(PROGRAMS[0])
    out = next(iter(data["outputs"].values()))
    while len(data["nodes"]) < count:
        data["nodes"].append(["exp", [out], None])
        out = len(data["nodes"]) - 1
    return json.dumps(data | {"outputs": dict.fromkeys(data["outputs"], out)})


def filled(**fields: Json) -> str:
    return json.dumps(PROGRAMS[0] | fields)


SIGNATURE = Program.from_json(json.dumps(PROGRAMS[0])).signature
LARGE = {
    "brackets": ("[" * MAX_BYTES, "json"),
    "closed brackets": ("[" * (MAX_BYTES // 2) + "]" * (MAX_BYTES // 2), "json"),
    "objects in objects": ('{"a":' * (MAX_BYTES // 5), "json"),
    "a row of objects": ("[" + ",".join(["{}"] * (MAX_BYTES // 3 - 1)) + "]", "json"),
    "a long integer": ("1" * MAX_BYTES, "json"),
    "a long exponent": ("1e" + "9" * (MAX_BYTES - 2), "json"),
    "one byte more": (" " * (MAX_BYTES + 1), "size"),
    "surrogates": ('"' + "\ud800" * (MAX_BYTES // 2) + '"', "json"),
    "513 nodes": (grown(513), "size"),
    "many nodes": (filled(nodes=[["exp", [0], None]] * 50000), "size"),
    "many arguments": (filled(nodes=[["exp", [0] * 300000, None]]), "graph"),
    "a long operation": (filled(nodes=[["e" * 900000, [], None]]), "operation"),
    "a long constant": (filled(nodes=[["constant", [], ["float", "0x1." + "f" * 900000]]]), "graph"),
    "many outputs": (filled(outputs={f"o{i}": 0 for i in range(60000)}), "outputs"),
    "many schedules": (filled(schedule={str(i): {} for i in range(999)}), "schedule"),
    "many inputs": (
        filled(signature=PROGRAMS[0]["signature"] | {"inputs": {f"i{i}": {} for i in range(60000)}}),
        "signature",
    ),
}


@pytest.mark.parametrize(("text", "code"), LARGE.values(), ids=LARGE)
def test_large_programs_cost_little(text: str, code: str) -> None:
    assert len(text) > 10000
    start = time.process_time()
    with pytest.raises(ProgramError) as caught:
        Program.from_json(text, SIGNATURE)
    assert caught.value.code == code, caught.value
    # without size limits, reading a hostile program would take minutes; with them, it may take a second on a
    # busy machine
    assert time.process_time() - start < 10
    tracemalloc.start()
    with pytest.raises(ProgramError):
        Program.from_json(text, SIGNATURE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_the_largest_program_is_read_and_lowered() -> None:
    assert outcome(grown(512)) == "interpreted"
