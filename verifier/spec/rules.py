"""The rules of a spec that types cannot express: rules about names, sizes, cases and texts.

A broken rule raises a fault, with a message for the spec's author and a position (the keys that lead from the
validated model to the wrong value). ``verifier.spec.file`` turns the position into a line of the file.
"""

from __future__ import annotations

import ast
import keyword
import math
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Literal, Protocol

from coda_agent.primitives.compiler.lowered import HEAD_GRAIN
from coda_agent.primitives.compiler.roofline import ITEM_BYTES
from coda_agent.primitives.lang.dims import NAME as DIM_NAME
from coda_agent.primitives.lang.dims import Dim, Unsolvable, named_by_callers, solving_order
from coda_agent.primitives.lang.signature import INDICES, OPERANDS, READABLE, VALUE_NAME, WRITABLE
from coda_agent.verifier.spec.fields import UNPARSABLE, fault, instead, unparsable
from coda_agent.verifier.spec.parts import Case, Declared, ForwardSpec, OutputSpec, TensorSpec

RESERVED = ("name", "sizes", "bench")  # keys of a case that are not sizes
HIDDEN, ONE_ROW = "hidden", "hidden, one row"  # names of the hidden (random) sizes in reports
MOST_DIMS = 64
MEMORY = 80e9  # bytes of an H100
KINDS = ("scalar", "vector", "matrix", "matrix for each expert")  # by number of axes
PARTS = "_parts"  # suffix of an output that holds partial sums of a gradient


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[Dim, ...]: ...


def check(spec: Declared) -> None:
    """Check every rule, in the order in which a spec is read."""
    _check_names(spec)
    _check_shapes(spec)
    _check_kinds(spec)
    _check_solvable(spec)
    _check_columns(spec)
    _check_updates(spec)
    _check_cases(spec)
    _check_text(spec, "reference")
    if spec.baseline is not None:
        _check_text(spec, "baseline")
    if spec.forward:
        _check_forward(spec, spec.forward)


def _check_names(spec: Declared) -> None:
    if len(spec.dims) > MOST_DIMS:
        raise fault(f"{len(spec.dims)} dims; give at most {MOST_DIMS}", "dims")
    for dim in spec.dims:
        if not DIM_NAME.fullmatch(dim) or keyword.iskeyword(dim) or dim in RESERVED:
            raise fault(f"dim {dim!r} is not a name for a size; use a word such as M or d_model", "dims", dim)
    for dim in spec.static:
        if dim not in spec.dims:
            raise fault(f"static dim {dim!r} is not declared; {instead(dim, spec.dims)}", "static")
        if spec.static.count(dim) > 1:
            raise fault(f"static names dim {dim!r} twice; name it once", "static")
    for dim, sizes in spec.only.items():
        if dim not in spec.static:
            raise fault(f"only names {dim!r}; it may name only static dims", "only", dim)
        if not sizes or min(sizes) < 1:
            raise fault(f"only gives {dim} the sizes {list(sizes)}; list positive sizes", "only", dim)
    _check_name(spec.name, "name")
    taken = {dim: "a dim" for dim in spec.dims}
    for kind in ("inputs", "outputs", "constants"):
        for name in getattr(spec, kind):
            _check_name(name, kind, name)
            if name in taken:
                raise fault(f"{name!r} is already {taken[name]}; choose another name", kind, name)
            taken[name] = f"among the {kind}"
    for name, value in spec.constants.items():
        if not math.isfinite(value):
            raise fault(f"constant {name} is {value}; it must be finite", "constants", name)


def _check_name(name: str, *place: str | int) -> None:
    if not VALUE_NAME.fullmatch(name) or keyword.iskeyword(name):
        rule = "use a-z, 0-9 and _, a letter first, at most 64, no Python keyword"
        raise fault(f"{name!r} is not a name for a value; {rule}", *place)


def _check_shapes(spec: Declared) -> None:
    for kind in ("inputs", "outputs"):
        tensors: dict[str, TensorSpec | OutputSpec] = getattr(spec, kind)
        if not tensors:
            raise fault(f"{kind} is empty; declare at least one", kind)
        for name, tensor in tensors.items():
            for axis, dim in enumerate(tensor.shape):
                for unknown in sorted(dim.names - set(spec.dims)):
                    message = f"dim {unknown!r} is not declared; {instead(unknown, spec.dims)}"
                    raise fault(message, kind, name, "shape", axis)


def _check_kinds(spec: Declared) -> None:
    """Check the dtypes and inits allowed for each rank."""
    for name, output in spec.outputs.items():
        rank = len(output.shape)
        if rank not in WRITABLE:
            raise fault(f"output {name} has {rank} axes; give it one, two or three", "outputs", name, "shape")
        if output.dtype not in WRITABLE[rank]:
            known = ", ".join(WRITABLE[rank])
            message = f"output {name} is a {KINDS[rank]} of {output.dtype}; it may be {known}"
            raise fault(message, "outputs", name, "dtype")
    for name, tensor in spec.inputs.items():
        _check_rank(name, tensor)
        _check_init(name, tensor)
        if tensor.dtype in OPERANDS and spec.baseline is None:
            message = f"input {name} is {tensor.dtype}, which torch.matmul does not take: give a baseline"
            raise fault(f"{message} with torch._scaled_mm", "inputs", name, "dtype")
    _check_operands(spec)
    _check_experts(spec)


def _check_experts(spec: Declared) -> None:
    """Check that a spec with three-axis tensors also has the offsets of experts' rows."""
    if any(tensor.init.offsets is not None for tensor in spec.inputs.values()):
        return
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        for name, tensor in tensors.items():
            if len(tensor.shape) == 3:
                message = f"{kind} {name} has 3 axes: a matrix for each expert needs an input with init"
                raise fault(f"{message} {{offsets: T}}; flatten other tensors", f"{kind}s", name, "shape")


def _check_operands(spec: Declared) -> None:
    """If there are several fp8 matrices, check that each of them shares its row length with another. Only a
    gemm reads fp8 matrices, and a gemm's operands need rows of the same length."""
    eights = {name: t.shape[-1] for name, t in spec.inputs.items() if t.dtype in OPERANDS}
    for name, inner in eights.items():
        if [*eights.values()].count(inner) < 2 <= len(eights):
            message = f"input {name} is fp8, and no other fp8 matrix has rows of {inner}; a gemm of fp8 is"
            raise fault(f"{message} x @ w.mT: give x as [M, K] and w as [N, K]", "inputs", name, "shape")


def _check_rank(name: str, tensor: TensorSpec) -> None:
    rank, dtype = len(tensor.shape), tensor.dtype
    if rank not in READABLE:
        raise fault(f"input {name} has {rank} axes; give it at most three", "inputs", name, "shape")
    if dtype not in READABLE[rank]:
        kind = KINDS[rank]
        message = f"input {name} is a {kind} of {dtype}; a {kind} may be {', '.join(READABLE[rank])}"
        raise fault(message, "inputs", name, "dtype")


def _check_init(name: str, tensor: TensorSpec) -> None:
    form, place = tensor.init.form, ("inputs", name, "init")
    if tensor.dtype in INDICES:
        if form not in ("integers", "count", "offsets"):
            message = f"input {name} is {tensor.dtype}: give init {{integers: [0, V]}}, {{count: 8192}} or"
            raise fault(f"{message} {{offsets: T}}", *place)
        if form == "offsets" and (len(tensor.shape), tensor.dtype) != (1, "int32"):
            raise fault(f"input {name} has offsets: it must be a vector of int32", *place, "offsets")
    elif form in ("integers", "offsets"):
        message = f"input {name} is {tensor.dtype}: {form} are for {' and '.join(INDICES)}"
        raise fault(f"{message}; use normal or uniform", *place, form)


def _check_solvable(spec: Declared) -> None:
    shapes, dims = {name: t.shape for name, t in spec.inputs.items()}, tuple(spec.dims)
    try:
        solving_order(shapes, dims, named_by_callers(shapes, dims, spec.static))
    except Unsolvable as error:
        message = f"dim {error.dim!r} follows from no input's shape; give an input an axis of {error.dim}, "
        raise fault(f"{message}or make it static, which callers then name", "dims", error.dim) from None


def _check_columns(spec: Declared) -> None:
    for name, output in spec.outputs.items():
        if missing := missing_static(output.shape, spec.inputs.values(), spec.static):
            said = (
                f"output {name} has {output.shape[-1]} columns, but no product of these inputs has; a range"
            )
            remedy = f"of a product's columns needs a static width: add {', '.join(missing)} to static"
            raise fault(f"{said} {remedy}", "outputs", name, "shape", 1)


def missing_static(shape: Sequence[Dim], inputs: Iterable[Shaped], static: Sequence[str]) -> tuple[str, ...]:
    """The dims that must be static because an output of this shape can only be a range of a tile's columns.
    The result is empty if a kernel can compute the output in another way.

    There are two other ways. First, the output may be a whole tile. The number of a tile's columns is an
    input's extent, multiplied or divided by a power of two (``join``, ``pairs``). Second, the output may be a
    statistic, such as a sum over each head's columns. A head is a group of a product's adjacent columns. A
    statistic has one column for each head. If the extents contain no static dim, a head has at least
    HEAD_GRAIN columns. A product has at most four times as many columns as an input's extent. To compare
    extents, this function replaces static dims by numbers.
    """
    columns, numbers = shape[-1], dict(zip(static, count(1009, 2), strict=False))
    missing = tuple(sorted(columns.names - {*static}))
    if len(shape) != 2 or not missing:
        return ()
    for extent in (extent for tensor in inputs for extent in tensor.shape):
        ratio = extent.at(numbers).ratio(columns.at(numbers))
        if ratio is None:
            continue
        wide, narrow = ratio
        doubled = (wide & (wide - 1)) == 0 == (narrow & (narrow - 1))
        grain = 1 if (extent.names | columns.names) & {*static} else HEAD_GRAIN
        if doubled or 4 * wide % (grain * narrow) == 0:
            return ()
    return missing


def _check_updates(spec: Declared) -> None:
    seen: dict[str, str] = {}
    for name, output in spec.outputs.items():
        target = output.updates
        if target is None:
            continue
        place = ("outputs", name, "updates")
        if target not in spec.inputs:
            raise fault(
                f"updates names {target!r}, which is not an input; {instead(target, spec.inputs)}", *place
            )
        into = spec.inputs[target]
        if (into.shape, into.dtype) != (output.shape, output.dtype):
            message = f"{name} is {describe(output)} but updates {target}, {describe(into)}; make them alike"
            raise fault(message, *place)
        if target in seen:
            raise fault(f"input {target!r} is already updated by {seen[target]!r}", *place)
        seen[target] = name


def describe(tensor: TensorSpec | OutputSpec) -> str:
    """Describe a tensor's dtype and shape."""
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def _check_cases(spec: Declared) -> None:
    if not spec.cases:
        raise fault("cases is empty; give at least one", "cases")
    names: set[str] = set()
    for index, case in enumerate(spec.cases):
        _check_sizes(spec, case, index)
        if case.name in names:
            raise fault(
                f"case {case.name!r} occurs twice; give each case its own name", "cases", index, "name"
            )
        if case.name.partition(",")[0] == HIDDEN or case.name.startswith("tuned "):
            words = "the verifier's own sizes have such names; choose another"
            raise fault(f"case {case.name!r}: {words}", "cases", index, "name")
        names.add(case.name)
        _check_values(spec, case)
        _check_memory(spec, case, index)
    if not any(case.bench for case in spec.cases):
        raise fault("no case is timed; leave out 'bench: false' in one case", "cases")


def _check_sizes(spec: Declared, case: Case, index: int) -> None:
    for dim, size in case.sizes.items():
        if dim not in spec.dims:
            remedy = instead(dim, [*spec.dims, "name", "bench"])
            raise fault(f"case {case.name!r}: unknown key {dim!r}; {remedy}", "cases", index, dim)
        if size not in spec.only.get(dim, (size,)):
            known = ", ".join(map(str, spec.only[dim]))
            raise fault(f"case {case.name!r}: {dim} is {size}; only allows {known}", "cases", index, dim)
        if type(size) is not int or size <= 0:
            message = f"case {case.name!r}: {dim} is {size!r}; it must be a positive integer"
            raise fault(message, "cases", index, dim)
    missing = [dim for dim in spec.dims if dim not in case.sizes]
    if missing:
        raise fault(f"case {case.name!r} gives no size for {', '.join(missing)}", "cases", index)


def _check_memory(spec: Declared, case: Case, index: int) -> None:
    tensors: list[TensorSpec | OutputSpec] = [*spec.inputs.values(), *spec.outputs.values()]
    taken = sum(ITEM_BYTES[t.dtype] * math.prod(dim(case.sizes) for dim in t.shape) for t in tensors)
    if taken > MEMORY:
        words = f"{taken / 1e9:,.0f} GB, and an H100 has {MEMORY / 1e9:.0f} GB; give smaller sizes"
        raise fault(f"case {case.name!r}: its tensors take {words}", "cases", index)


def _check_values(spec: Declared, case: Case) -> None:
    for kind in ("inputs", "outputs"):
        for name, tensor in getattr(spec, kind).items():
            for axis, dim in enumerate(tensor.shape):
                if dim(case.sizes) <= 0:
                    message = f"size {dim} is {dim(case.sizes)} in case {case.name!r}; it must be positive"
                    raise fault(message, kind, name, "shape", axis)
    for name, tensor in spec.inputs.items():
        _check_range(name, tensor, case)
        _check_domain(name, tensor, case)


def _check_range(name: str, tensor: TensorSpec, case: Case) -> None:
    """Check that arithmetic over dims gives a legal range in every case."""
    init = tensor.init
    place: tuple[str, ...] = ("normal", "std") if init.normal else (init.form,)
    try:
        if init.normal:
            init.normal.at(case.sizes)
        elif init.form in ("integers", "count", "offsets"):
            bounds = *init.range_at(case.sizes), init.ignored or 0
            limit = 1 << (31 if tensor.dtype == "int32" else 63)
            if tensor.dtype in INDICES and not all(-limit <= value < limit for value in bounds):
                raise ValueError(f"range {bounds[0]} to {bounds[1]} does not fit {tensor.dtype}")
    except ValueError as error:
        message = f"{place[-1]} {error} in case {case.name!r}"
        raise fault(message, "inputs", name, "init", *place) from None


def _check_domain(name: str, tensor: TensorSpec, case: Case) -> None:
    """Check that ``init`` draws only legal values."""
    place = ("inputs", name, "domain")
    try:
        low, high = tensor.bounds(case.sizes)
    except ValueError as error:
        raise fault(f"domain {error} in case {case.name!r}", *place) from None
    least, most = tensor.init.span_at(case.sizes)
    if not low <= least <= most <= high:
        said = f"init {tensor.init.form} draws {least:g} to {most:g}, and the domain is {low:g} to {high:g}"
        raise fault(f"{said} in case {case.name!r}: let the domain contain the drawn values", *place)


def _check_text(spec: Declared, key: Literal["reference", "baseline"]) -> None:
    stored = _parsed(getattr(spec, key), key)
    for output in spec.outputs:
        if output not in stored:
            raise fault(f"{key} never assigns output {output!r}; add a line '{output} = ...'", key)


def _check_forward(spec: Declared, forward: ForwardSpec) -> None:
    """Check the names of a backward. Each output must be the gradient of one of the forward's inputs. At
    least one input must be the gradient of a value that the forward assigns."""
    place = "forward"
    for name, tensor in forward.inputs.items():
        if name in (*spec.inputs, *spec.outputs, *spec.dims, *spec.constants):
            raise fault(f"{name!r} is declared outside forward; leave it out here", place, "inputs", name)
        for unknown in sorted({d for dim in tensor.shape for d in dim.names} - set(spec.dims)):
            message = f"dim {unknown!r} is not declared; {instead(unknown, spec.dims)}"
            raise fault(message, place, "inputs", name, "shape")
        _check_name(name, place, "inputs", name)
        _check_rank(name, tensor)
        _check_init(name, tensor)
    stored = _parsed(forward.reference, place, "reference") | _parsed(forward.head, place, "head")
    read = {n: t for n, t in (spec.inputs | forward.inputs).items() if n not in stored}
    floats = [n for n, t in read.items() if t.dtype not in INDICES]
    if not any(n.startswith("d_") and n[2:] in stored for n in floats):
        message = "no input is the gradient of a value that forward assigns; name such an input d_VALUE"
        raise fault(message, place)
    for name, output in spec.outputs.items():
        of = name[2:].removesuffix(PARTS)
        if not (name.startswith("d_") and of in floats):
            message = f"output {name!r} is not the gradient of a drawn float input; name it d_ and the input"
            raise fault(message, "outputs", name)
        if not name.endswith(PARTS) and output.shape != read[of].shape:
            shape, whole = (f"[{', '.join(map(str, t.shape))}]" for t in (output, read[of]))
            message = f"output {name} has shape {shape}, and {of} has shape {whole}: give both the same shape"
            raise fault(f"{message}, or name partial sums {name}{PARTS}", "outputs", name)


def assigned(text: str) -> set[str]:
    """The names that a reference text assigns."""
    nodes = ast.walk(ast.parse(text))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _parsed(text: str, *place: str) -> set[str]:
    """The names that a text assigns. Raises a fault if the text does not parse, or imports anything."""
    try:
        tree = ast.parse(text)
    except UNPARSABLE as error:
        line = getattr(error, "lineno", None) or 1
        raise fault(f"{place[-1]}: {unparsable(error)}", *place, line) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            words = f"{place[-1]}: write out what {node.name} computes; a text defines nothing"
            raise fault(words, *place, node.lineno)
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Await):
            words = f"{place[-1]}: assign each output to its name instead of returning it"
            raise fault(words, *place, node.lineno)
        if isinstance(node, ast.Import | ast.ImportFrom):
            words = f"{place[-1]}: remove the import: torch and its names are in scope"
            raise fault(words, *place, node.lineno)
    return assigned(text)
