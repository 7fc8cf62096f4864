"""``coda-agent new``: draft a spec from a PyTorch function.

The command parses the function's source, and takes missing facts from its options or from the user's answers.
To infer the shapes and dtypes of the outputs, the command runs the function's body as the spec's reference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import typer

from coda_agent.agent import arguments
from coda_agent.agent.scaffold.draft import SpecDraft, TensorDraft
from coda_agent.agent.scaffold.function import Function, ScaffoldError, read
from coda_agent.agent.scaffold.infer import Found, cut, infer, proven, trial_sizes
from coda_agent.agent.terminal.safe_text import echo
from coda_agent.primitives.lang.dims import NAME, Dim
from coda_agent.primitives.lang.signature import DTYPES, EIGHTS, INDICES, READABLE, VALUE_NAME, WRITABLE
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.spec.rules import missing_static

ROWS, DECODED, RAGGED = 16384, 128, 1000
WIDTH, HEADS, RAGGED_HEADS = 4096, 32, 13


class ScaffoldOptions(NamedTuple):
    """The command's options. ``dim`` maps dims to sizes. ``shape`` and ``dtype`` map inputs or outputs to
    shapes and dtypes. ``init`` maps inputs to distributions. If ``ask`` is true, the command asks the user
    for missing values."""

    dim: Mapping[str, str]
    shape: Mapping[str, str]
    dtype: Mapping[str, str]
    init: Mapping[str, str]
    ask: bool

    @classmethod
    def parse(cls, ask: bool, **options: Sequence[str] | None) -> ScaffoldOptions:
        pairs = {kind: _pairs(kind, texts or ()) for kind, texts in options.items()}
        return cls(ask=ask, **pairs)


def new(target: str, out: Path | None, options: ScaffoldOptions) -> tuple[Path, SpecDraft]:
    """Write a spec for the function ``path/to/file.py:function``. Return the spec's path and the draft.

    Raises ScaffoldError; no file is written then.
    """
    function = read(target, {*options.shape, *options.dtype})
    path = out or Path("specs") / f"{function.name}.yaml"
    if path.exists():
        raise ScaffoldError(f"{path}: the file already exists; remove it, or choose another path with --out")
    if not VALUE_NAME.fullmatch(path.stem):
        raise ScaffoldError(
            f"{path.stem!r} is not a valid spec name; use only a-z, 0-9 and _ in the file's name (--out)"
        )
    draft = _drafted(path.stem, function, options)
    for name, found in infer(draft).items():
        draft.outputs[name] = _output(draft, options, name, found)
        draft.static += missing_static(draft.outputs[name].shape, draft.inputs.values(), draft.static)
    draft.function = replace(draft.function, notes=proven(draft))
    _initialise(draft, options)
    draft.cases = _cases(draft, _measured_sizes(draft, options))
    draft.spec(check=True)
    try:
        write_atomic(path, str(draft))
    except OSError as error:
        raise ScaffoldError(f"{path}: {error.strerror}; choose another path with --out") from None
    for note in draft.notes():
        echo(f"note: {note}", err=True)
    return path, draft


def _drafted(name: str, function: Function, options: ScaffoldOptions) -> SpecDraft:
    """Return a draft whose reference can run. The outputs and sizes in the draft are placeholders."""
    place = f"{function.path}:{function.line}"
    inputs = _inputs(function, options)
    dims = _dims(inputs)
    if not dims:
        raise ScaffoldError(f"{place}: no shape names a dim; give the first input a shape such as M,K")
    for n, size in function.sizes.items():
        if n not in dims and size is None:
            message = f"parameter {n} has no value, and no shape names it as a dim"
            raise ScaffoldError(f"{place}: {message}; name it in a shape, or give it a default")
    static = tuple(n for n in function.sizes if n in dims)
    made_up = TensorDraft((Dim.parse(next(iter(dims))),), "fp32")
    draft = SpecDraft(name, function, inputs, dims, static, dict.fromkeys(function.outputs, made_up))
    _index(draft, options)
    tried, _ = trial_sizes(draft)
    draft.cases = [{"name": "tried"} | {dim: 8 * size for dim, size in tried.items()}]
    return draft


def _inputs(function: Function, options: ScaffoldOptions) -> dict[str, TensorDraft]:
    """Return the inputs' shapes and dtypes, taken from options, annotations or the user's answers."""
    inputs = {t.name: t for t in function.tensors}
    _check_names("shape", options.shape, [*inputs, *function.outputs])
    _check_names("dtype", options.dtype, [*inputs, *function.outputs])
    _check_names("init", options.init, list(inputs))
    missing = [n for n, t in inputs.items() if not (options.ask or t.shape or n in options.shape)]
    if missing:
        remedy = " ".join(f"--shape {n}=..." for n in missing)
        place = f"{function.path}:{function.line}"
        raise ScaffoldError(f"{place}: no shape for {', '.join(missing)}; give {remedy}, such as M,K")
    entries: dict[str, TensorDraft] = {}
    for n, t in inputs.items():
        usual = t.shape or (None if entries else "M,K")
        shape = _answer(options, "shape", n, f"{n}: shape, such as M,K ([] for a scalar)", usual, _shape)
        allowed = READABLE[len(shape)]
        default = t.dtype if t.dtype in allowed else allowed[0]
        dtype = _answer(options, "dtype", n, f"{n}: dtype", default, _one_of(allowed))
        entries[n] = TensorDraft(shape, dtype)
    return entries


def _dims(entries: Mapping[str, TensorDraft]) -> dict[str, str]:
    """Return a description of each dim in the inputs' shapes. The dims are in order of appearance."""
    axes = {1: ("length",), 2: ("rows", "columns")}
    dims: dict[str, str] = {}
    for plain in (True, False):
        for name, entry in entries.items():
            for axis, extent in zip(axes.get(len(entry.shape), ()), entry.shape, strict=True):
                for dim in sorted(extent.names) if plain is (str(extent) in extent.names) else ():
                    dims.setdefault(dim, f"{axis} of {name}" if plain else f"in the {axis} of {name}")
    order = [dim for e in entries.values() for extent in e.shape for dim in sorted(extent.names)]
    return {dim: dims[dim] for dim in dict.fromkeys(order)}


def _index(draft: SpecDraft, options: ScaffoldOptions) -> None:
    """Give each integer input the range from which its values are drawn."""
    for name, entry in draft.inputs.items():
        if entry.dtype in INDICES:
            own_dims = {n for extent in entry.shape for n in extent.names}
            bound = next((dim for dim in reversed(draft.dims) if dim not in own_dims), 2)
            default = f"{{integers: [0, {bound}]}}"
            init = _answer(options, "init", name, f"{name}: range of its values", default, str)
            draft.inputs[name] = entry._replace(init=init)


def _output(draft: SpecDraft, options: ScaffoldOptions, name: str, found: Found) -> TensorDraft:
    if not found.shape:
        raise draft.fail(
            f"output {name} is a scalar; return a vector or a matrix, such as the terms of a sum"
        )
    shape = tuple(extent for extent in found.shape if extent is not None)
    if name in options.shape or None in found.shape:
        sizes, tried = trial_sizes(draft)[0], found.extents[0]
        if name not in options.shape and (part := cut(draft, found)):
            remedy = " ".join(f"--shape {n}={shape}" for n, shape in _multiplied(draft, *part).items())
            fraction = {2: "half", 3: "a third", 4: "a quarter"}[part[1]]
            message = f"an axis of output {name} is {fraction} of {part[0]}, but a shape cannot divide a dim"
            raise draft.fail(f"{message}; give {remedy}")
        if name not in options.shape and not options.ask:
            raise draft.fail(
                f"output {name} has shape {tried} at {sizes}; name its dims with --shape {name}=..."
            )
        question = f"{name}: dims of its shape, which is {tried} at {sizes}"
        shape = _answer(options, "shape", name, question, None, _shape)
    valid = _one_of(WRITABLE.get(len(shape), DTYPES))
    dtype = _answer(options._replace(ask=False), "dtype", name, "", found.dtype, valid)
    return TensorDraft(shape, dtype)


def _multiplied(draft: SpecDraft, dim: str, number: int) -> dict[str, str]:
    """Replace ``dim`` by ``number*dim`` in the inputs' shapes, and return the shapes that change. For
    example, an axis ``N`` becomes ``2*N``, so that half of the axis has the extent ``N``."""
    shapes = {name: ",".join(map(str, entry.shape)) for name, entry in draft.inputs.items()}
    more = {name: re.sub(rf"\b{dim}\b", f"{number}*{dim}", shape) for name, shape in shapes.items()}
    return {name: shape for name, shape in more.items() if shape != shapes[name]}


def _initialise(draft: SpecDraft, options: ScaffoldOptions) -> None:
    """Choose the distribution of each input. Weights are scaled so that a matmul's output is as large as the
    matmul's input. The values of a vector are around 1, except for biases and indices."""
    rows = draft.rows()
    leads = {n: bool(e.shape) and bool(e.shape[0].names & rows) for n, e in draft.inputs.items()}
    inner = {e.shape[1] for n, e in draft.inputs.items() if leads[n] and len(e.shape) == 2}
    for name, entry in draft.inputs.items():
        init = entry.init
        if len(entry.shape) == 2 and not leads[name]:
            summed = next((d for d in reversed(entry.shape) if d in inner), entry.shape[1])
            deep = str(summed) if NAME.fullmatch(str(summed)) else f"({summed})"
            init = f"{{normal: {{std: {deep}**-0.5}}}}" if summed.names else ""
        elif len(entry.shape) == 1 and entry.dtype not in INDICES and "bias" not in name:
            init = "{uniform: [0.5, 1.5]}"
        chosen = options.init.get(name, init)
        draft.inputs[name] = entry._replace(init=chosen, domain=_domain(name, entry, chosen))


def _domain(name: str, entry: TensorDraft, init: str) -> str:
    """Return the domain (the legal values) of an input. Integers stay in the range of ``init``. An input with
    "rstd" or "scale" in its name is positive if ``init`` is uniform and has no minus sign. All other inputs
    are finite."""
    if entry.dtype in INDICES and (bounds := re.search(r"integers: \[([^,\]]+), ([^,\]]+)\]", init)):
        return f"[{bounds[1]}, {bounds[2]} - 1]"
    above_zero = "uniform" in init and "-" not in init and re.search(r"rstd|scale", name)
    return "positive" if above_zero else "finite"


def _measured_sizes(draft: SpecDraft, options: ScaffoldOptions) -> dict[str, int]:
    """Return the dims' sizes in the case that is timed."""
    _check_names("dim", options.dim, list(draft.dims))
    rows, heads = draft.rows(), draft.heads()
    sizes = {}
    for dim, description in draft.dims.items():
        usual = ROWS if dim in rows else HEADS if dim in heads else WIDTH
        default = str(draft.function.sizes.get(dim) or (64 if dim in draft.static else usual))
        question = f"{dim} ({description}): size in the timed case"
        sizes[dim] = _answer(options, "dim", dim, question, default, _size)
    return sizes


def _cases(draft: SpecDraft, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Return the timed case, a case with few rows, and a case with ragged sizes. In the ragged case a
    tensor's row is still a multiple of 16 bytes, as TMA requires."""
    rows, heads = draft.rows(), draft.heads()
    eights = any(e.dtype in EIGHTS for e in (*draft.inputs.values(), *draft.outputs.values()))
    grain = 16 if eights else 8
    widths = iter(range(512 + grain, 1 << 20, 256))
    ragged = {
        dim: size if dim in draft.static
        else RAGGED + 8 * sorted(rows).index(dim) if dim in rows
        else RAGGED_HEADS if dim in heads
        else next(widths)
        for dim, size in sizes.items()
    }  # fmt: skip
    few = {dim: min(size, DECODED) if dim in rows else size for dim, size in sizes.items()}
    decode = [{"name": "decode", **few, "bench": "report"}] if few != sizes else []
    return [{"name": "large", **sizes}, *decode, {"name": "ragged", **ragged, "bench": "false"}]


def _answer(
    options: ScaffoldOptions,
    kind: str,
    name: str,
    question: str,
    default: str | None,
    parse: Callable[[str], Any],
) -> Any:
    """Return the option's value, or else the user's answer, or else the default."""
    text = getattr(options, kind).get(name, None if options.ask else default)
    try:
        if text is not None:
            return parse(text)
        with arguments.asking():
            return typer.prompt(question, default, value_proc=parse)
    except typer.BadParameter as error:
        raise ScaffoldError(f"--{kind} {name}={text}: {error.message}") from None
    except EOFError:
        raise ScaffoldError(f"no answer to {question!r}; use --{kind} {name}=...") from None


def _shape(text: str) -> tuple[Dim, ...]:
    try:
        shape = tuple(Dim.parse(part.strip()) for part in text.strip(" []()").split(",") if part.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if len(shape) > 2:
        raise typer.BadParameter(
            f"{len(shape)} axes, but a draft's tensors have at most two: flatten the rest; or, if each "
            "expert has a matrix, write the spec like specs/gemm_grouped_swiglu.yaml"
        )
    return shape


def _size(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise typer.BadParameter(f"{text!r} is not a size; write a positive integer")
    return int(text)


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in choices:
            raise typer.BadParameter(f"{text!r} is not valid here; use one of {', '.join(choices)}")
        return text.strip()

    return parse


def _pairs(kind: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = [_pair(kind, text) for text in texts]
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise ScaffoldError(f"--{kind} {name} occurs {times} times; keep one")
    return dict(pairs)


def _pair(kind: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ScaffoldError(f"--{kind} {text}: write --{kind} NAME=VALUE")
    return name.strip(), value


def _check_names(kind: str, options: Mapping[str, str], names: Sequence[str]) -> None:
    for name in options:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
            raise ScaffoldError(f"--{kind} {name}: {name!r} is unknown; {remedy}")
