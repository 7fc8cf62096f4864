"""Write a program as straight-line PyTorch, one line per value. The text becomes the reference of a derived
spec, or the code of a backward's pointwise head (the part before its matmuls)."""

from __future__ import annotations

from coda_agent.primitives.derive.simplify import reached
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Node, Program, sizes_named
from coda_agent.primitives.lang.signature import Type

NARROW = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
INFIX = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "greater": ">",
    "greater_equal": ">=",
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "not_equal": "!=",
}
CALLS = ("abs", "cos", "exp", "log", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "tanh")
# PyTorch texts of a GEMM with offsets. ROWS multiplies each expert's rows by that expert's matrix. OWN
# computes one product per expert: the expert's columns of the first operand times its rows of the second.
ROWS = "cat([a @ b for a, b in zip({0}{rows}.split({2}.diff().tolist()), {1})])"
OWN = "stack([a @ b for a, b in zip({0}.split({2}.diff().tolist(), 1), {1}.split({2}.diff().tolist()))])"
FORMS = {
    "negative": "-{0}",
    "gelu": "gelu({0}, approximate='tanh')",
    "where": "where({0} != 0, {1}, {2})",
    "per_row": "{0}[:, None]",
    "per_column": "{0}[None, :]",
    "transpose": "{0}.mT",
    "gemm": "{0} @ {1}",
    "even": "{0}[..., 0::2]",
    "odd": "{0}[..., 1::2]",
    "join": "torch.stack(({0}, {1}), -1).flatten(1)",
    "row_sums": "{0}.sum(-1)",
    "column_sums": "{0}.sum(0)",
    "row_max": "{0}.amax(-1)",
    "row_abs_max": "{0}.abs().amax(-1)",
    "column_max": "{0}.amax(0)",
    "column_abs_max": "{0}.abs().amax(0)",
    "head_abs_max": "{0}.unflatten(1, (-1, {sizes[0]})).abs().amax(-1)",
    "row_logsumexp": "logsumexp({0}, -1)",
    "row_select": "({0} * ({columns} == {1}[:, None])).sum(-1)",
    "head_sums": "{0}.unflatten(1, (-1, {sizes[0]})).sum(-1)",
    "per_head": "{0}",
    "as_tile": "torch.broadcast_to(torch.as_tensor({0}, device={1}.device), {1}.shape)",
    "in_columns": "(({columns} >= {sizes[0]}) & ({columns} < {sizes[0]} + {sizes[1]}))"
    ".expand({0}.shape) * 1.0",
    "column_index": "{columns}.expand({0}.shape)",
}


def reference(program: Program, cast: bool = False) -> str:
    """The PyTorch text of a program. ``cast``: cast the operands of matmuls to the inputs' 16-bit dtype.
    Raises ProgramError for an operation without a PyTorch text."""
    narrow = next((NARROW[t.dtype] for t in program.signature.inputs.values() if t.dtype in NARROW), "")
    taken = {*program.signature.inputs, *program.signature.outputs, *program.signature.dims}
    names: list[str] = []
    lines: list[str] = []
    types = program.types()
    chosen = {i: n for n, i in program.outputs.items()}
    used = set(reached(program.nodes, program.outputs.values()))
    literal = {i for i, n in enumerate(program.nodes) if n.op in ("constant", "dim")}
    for index, node in enumerate(program.nodes):
        if index not in used:
            names.append("")
        elif node.op in ("input", "dim"):
            text = str(node.attribute)
            names.append(text if text.isidentifier() else f"({text})")
        elif node.op == "constant":
            names.append(repr(node.attribute) if float(node.attribute or 0) >= 0 else f"({node.attribute!r})")
        else:
            name = chosen.get(index, f"v{index}")
            while index not in chosen and name in taken:
                name += "_"
            arguments = [_wide(names[a], types[a], types[index]) for a in node.args]
            arguments = _with_tensors(node, arguments, [a in literal for a in node.args])
            if cast and narrow and node.op == "gemm":
                arguments[:2] = [f"{operand}.to({narrow})" for operand in arguments[:2]]
            lines.append(f"{name} = {_expression(node, arguments, types[index])}")
            names.append(name)
            literal |= {index} if literal.issuperset(node.args) else set()
    return "\n".join(lines) + "\n"


def _with_tensors(node: Node, arguments: list[str], literal: list[bool]) -> list[str]:
    """The texts of an operation's arguments, changed so that torch accepts them. Torch's functions refuse
    Python numbers. ``literal``: whether each argument is computed from literals and sizes alone, and so may
    be a Python number, or a tensor on the CPU. A number becomes fp64, so that a reference in fp64 stays
    exact; a tensor without axes does not widen other tensors."""
    if node.op in ("maximum", "minimum") and literal == [True, False]:
        return arguments[::-1]
    if node.op in (*CALLS, "gelu") and literal[0]:
        return [f"torch.as_tensor({arguments[0]}, dtype=torch.float64)"]
    return arguments


def _wide(name: str, given: Type, wanted: Type) -> str:
    """The text of an argument of type ``given``, for an operation whose result has the type ``wanted``. If
    the result is a tile, values per head are repeated over the tile's columns."""
    if wanted.kind != "tile" or given.period is None:
        return name
    if given.kind == "spread":
        return f"{name}.repeat_interleave({given.period}, 1)"
    once = "1, " * (len(given.shape) - 1)
    return f"{name}.repeat({once}({wanted.shape[1]}) // ({given.period}))"


def _expression(node: Node, arguments: list[str], result: Type) -> str:
    first = arguments[0]
    if node.op == "gemm" and len(arguments) > 2:
        rows = "".join(f"[{index}]" for index in arguments[3:])
        return (OWN if result.kind == "experts" else ROWS).format(*arguments, rows=rows)
    if node.op in INFIX:
        plain = f"{first} {INFIX[node.op]} {arguments[1]}"
        return f"({plain}) * 1.0" if INFIX[node.op][0] in "<>=!" else plain
    if node.op in CALLS:
        return f"{node.op}({first})"
    if node.op in FORMS:
        sizes = [f"({size})" for size in sizes_named(node)]
        columns = f"torch.arange({first}.shape[1], device={first}.device)"
        return FORMS[node.op].format(*arguments, sizes=sizes, columns=columns)
    if node.op in ("maximum", "minimum"):
        return f"{node.op}({first}, torch.as_tensor({arguments[1]}, device={first}.device))"
    raise ProgramError("reference", f"{node.op} has no PyTorch text yet")
