"""Every refusal names the author's line and suggests a remedy. The suggested program can be traced and run. A
few suggested programs need a spec with other outputs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from authoring import KERNELS, SPECS, TOY_KERNEL, write_toy
from checkout import ROOT
from kernels import QK_NORM, ROPE, Example, draw, signature, source, tensor, trace
from spec_files import write_changed

from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import candidates
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Rejected
from coda_agent.verifier.verify import check

INPUTS = {
    "x": tensor("M, K"),
    "w": tensor("N, K"),
    "w2": tensor("2*N, K"),
    "w4": tensor("4*N, K"),
    "u": tensor("2*N, K"),
    "q": tensor("N, N"),
    "r": tensor("M, N"),
    "deep": tensor("2*M, N"),
    "wide": tensor("M, 8*N"),
    "wide_a": tensor("M, 2*N"),
    "wide_b": tensor("M, 2*N"),
    "v": tensor("M", "fp32"),
    "b": tensor("N"),
    "b2": tensor("2*N"),
    "i": tensor("M", "int32"),
}
TILE, PAIR, ROW = tensor("M, N"), tensor("M, 2*N"), tensor("M", "fp32")
HEADS = {
    "x": tensor("M, K"),
    "w": tensor("2*H*P, K"),
    "w2": tensor("4*H*P, K"),
    "z": tensor("M, 2*H*P"),
    "wo": tensor("2*H*P, D"),
    "p": tensor("M", "int32"),
    "f": tensor("P", "fp32"),
    "g": tensor("2*P"),
    "g4": tensor("4*P"),
    "even": tensor("2*P"),
    "odd": tensor("2*P"),
    "whole": tensor("2*H*P"),
    "both": tensor("4*H*P"),
    "stat": tensor("M, H", "fp32"),
    "cs": tensor("M, 2*P"),
}
TURNED, STAT = tensor("M, 2*H*P"), tensor("M, H", "fp32")
SIZES = {"M": 8, "K": 16, "N": 8, "H": 2, "P": 8, "D": 16}
H = "h = gemm(x, w.mT)"
T = "t = gemm(x, w.mT)"


class Case(NamedTuple):
    """A program whose ``lines`` are refused at ``line``. The message contains each of ``words``. ``instead``
    is the suggested program. Its outputs are ``others`` if given, else ``outputs``."""

    outputs: dict[str, TensorType]
    lines: tuple[str, ...]
    line: int
    words: tuple[str, ...]
    instead: tuple[str, ...]
    others: dict[str, TensorType] | None = None


TILES = {
    "select from half": Case(
        {"o": ROW},
        ("a, _ = pairs(gemm(x, w2.mT))", "s = row_select(a, i)", "return {'o': s}"),
        5,
        ("write row_sums(where(column_index(t) == per_row(index), t, 0))",),
        (
            "a, _ = pairs(gemm(x, w2.mT))",
            "return {'o': row_sums(where(column_index(a) == per_row(i), a, 0))}",
        ),
    ),
    "softmax": Case(
        {"o": TILE},
        (H, "return {'o': exp(h - per_row(row_logsumexp(h)))}"),
        5,
        ("return the vector", "another kernel that takes it as an input", "gemm(x, w.mT) - per_row(lse)"),
        ("return {'o': exp(gemm(x, w.mT) - per_row(v))}",),
    ),
    "softmax of the same gemm again": Case(
        {"o": TILE},
        (H, "lse = row_logsumexp(h)", "again = gemm(x, w.mT)", "return {'o': exp(again - per_row(lse))}"),
        7,
        ("in one kernel the same gemm written twice is one value",),
        (H, "lse = row_logsumexp(h)", "return {'s': lse}"),
        {"s": ROW},
    ),
    "row scale of the last tile": Case(
        {"o": TILE},
        (H, "rstd = rsqrt(row_sums(h * h))", "o = h * per_row(rstd)", "return {'o': o}"),
        6,
        ("combine the vector with a later gemm's tile, as gemm(t, w) * per_row(scale)",),
        (H, "rstd = rsqrt(row_sums(h * h))", "return {'o': gemm(h, q) * per_row(rstd)}"),
    ),
    "sum of a scaled row": Case(
        {"o": ROW},
        (H, "scale = row_max(h)", "o = row_sums(h * per_row(scale))", "return {'o': o}"),
        6,
        ("move a row scale out of the row sum, as row_sums(t) * scale",),
        (H, "scale = row_max(h)", "return {'o': row_sums(h) * scale}"),
    ),
    "scaled operand": Case(
        {"o": TILE},
        (H, "scale = row_max(h)", "s = h * per_row(scale)", "return {'o': gemm(s, q)}"),
        6,
        ("write gemm(t, w) * per_row(scale) instead of gemm(t * per_row(scale), w)",),
        (H, "scale = row_max(h)", "return {'o': gemm(h, q) * per_row(scale)}"),
    ),
    "infinity as a mask": Case(
        {"o": ROW},
        (H, "kept = where(column_index(h) < per_row(i), h, float('-inf'))", "return {'o': row_max(kept)}"),
        5,
        ("constant -inf is not finite in fp32: write a finite number, such as -3.4e38",),
        (H, "kept = where(column_index(h) < per_row(i), h, -3.4e38)", "return {'o': row_max(kept)}"),
    ),
    "pairs of a bias": Case(
        {"o": TILE},
        ("t = gemm(x, w2.mT)", "a, c = pairs(per_column(b2))", "return {'o': pairs(t)[0] + a}"),
        5,
        ("let it meet the tile first, as pairs(t + per_column(v))",),
        ("a, c = pairs(gemm(x, w2.mT) + per_column(b2))", "return {'o': a * c}"),
    ),
    "a quarter": Case(
        {"o": TILE},
        ("t = gemm(x, w4.mT)", "a, c = pairs(t)", "e, f = pairs(a)", "return {'o': e * f}"),
        7,
        ("can be a quarter or four times as wide", "the weight into two inputs, with one gemm each"),
        ("a, c = pairs(gemm(x, w2.mT))", "e, f = pairs(gemm(x, u.mT))", "return {'o': a * c * e * f}"),
    ),
    "a fourfold": Case(
        {"o": tensor("M, 4*N")},
        (H, "d = join(h, h * 2)", "return {'o': join(d, d)}"),
        6,
        ("split an input or output into two of half its width",),
        (H, "return {'o': join(h, h * 2), 'p': join(h, h)}"),
        {"o": PAIR, "p": PAIR},
    ),
    "a loaded fourfold": Case(
        {"o": PAIR},
        ("t = gemm(x, w2.mT)", "a, _ = pairs(wide)", "c, _ = pairs(a)", "return {'o': t * c}"),
        5,
        ("a tile [M, 8*N] in the epilogue of a gemm [M, 2*N]", "into two of half its width"),
        ("t = gemm(x, w2.mT)", "return {'o': t * wide_a * wide_b}"),
    ),
    "sum of inputs": Case(
        {"o": TILE, "s": ROW},
        (H, "s = row_sums(r)", "return {'o': h, 's': s}"),
        5,
        ("belongs to no GEMM", "in the epilogue of a gemm t of its shape, add 0 * t"),
        (H, "return {'o': h, 's': row_sums(r + 0 * h)}"),
    ),
    "tile of inputs": Case(
        {"o": TILE, "s": TILE},
        (H, "s = r * per_row(v)", "return {'o': h, 's': s}"),
        5,
        ("in the epilogue of a gemm t of its shape, add 0 * t",),
        (H, "return {'o': h, 's': r * per_row(v) + 0 * h}"),
    ),
    "operand of inputs": Case(
        {"o": TILE},
        ("s = r * per_row(v)", "return {'o': gemm(s, q)}"),
        4,
        ("compute this in a PyTorch op before the kernel", "as gemm(x, w) * per_row(scale)"),
        ("return {'o': gemm(r, q) * per_row(v)}",),
    ),
    "other rows": Case(
        {"o": TILE},
        (H, "o = h + deep", "return {'o': o}"),
        5,
        ("their rows differ, M and 2*M; a kernel cannot move values between rows: use a PyTorch op",),
        (H, "return {'o': h + r}"),
    ),
    "a power of two": Case(
        {"o": TILE},
        (H, "o = 2 ** h", "return {'o': o}"),
        5,
        ("as exp(0.6931471805599453 * t)",),
        (H, "return {'o': exp(0.6931471805599453 * h)}"),
    ),
    "a negated comparison": Case(
        {"o": TILE},
        (H, "o = where(~(h > 0) & (h < 1), h, 0)", "return {'o': o}"),
        5,
        ("write a * b for and, maximum(a, b) for or, and 1 - a for not",),
        (H, "return {'o': where((1 - (h > 0)) * (h < 1), h, 0)}"),
    ),
}  # fmt: skip
HEADED = {
    "head sums of half": Case(
        {"o": STAT},
        ("a, c = pairs(gemm(x, w2.mT))", "s = head_sums(a * c, 2 * P)", "return {'o': s}"),
        5,
        ("write head_sums(join(t, 0 * t), 2 * W), where heads have W columns",),
        ("a, c = pairs(gemm(x, w2.mT))", "t = a * c", "return {'o': head_sums(join(t, 0 * t), 2 * (2 * P))}"),
    ),
    "head sums of double": Case(
        {"o": STAT},
        (T, "s = head_sums(join(t, t * t), 2 * (2 * P))", "return {'o': s}"),
        5,
        ("even, odd = pairs(t) and write head_sums(even + odd, W), where heads have 2 * W columns",),
        (T, "a, c = pairs(join(t, t * t))", "return {'o': head_sums(a + c, 2 * P)}"),
    ),
    "head sums of a loaded tile": Case(
        {"o": TURNED},
        (T, "d = t + z", "s = head_sums(d * d, 2 * P)", "return {'o': d * per_head(rsqrt(s))}"),
        6,
        ("no kernel has statistics of loaded heads", "in a PyTorch op before or after the kernel"),
        (T, "return {'o': t + z}"),
    ),
    "head sums of a centred head": Case(
        {"o": STAT},
        (T, "m = head_sums(t, 2 * P) / 16", "d = t - per_head(m)", "return {'o': head_sums(d * d, 2 * P)}"),
        7,
        ("compute it from sums of the accumulator, as a variance from head_sums(t * t, W) / W and",),
        (T, "m = head_sums(t, 2 * P) / (2 * P)", "return {'o': head_sums(t * t, 2 * P) / (2 * P) - m * m}"),
    ),
    "head sums of what repeats": Case(
        {"o": STAT},
        (T, "n = t * per_head(g)", "return {'o': head_sums(n, 2 * P)}"),
        6,
        ("add to the spec a vector with one entry per column, and write per_column(v)",),
        (T, "return {'o': head_sums(t * per_column(whole), 2 * P)}"),
    ),
    "per head of a double": Case(
        {"o": tensor("M, 4*H*P")},
        (T, "d = join(t, t) * per_head(g4)", "return {'o': d}"),
        5,
        ("meets a tile wider than its gemm", "join(a * per_head(v), b * per_head(u))"),
        (T, "d = join(t * per_head(even), t * per_head(odd))", "return {'o': d * per_column(both)}"),
    ),
    "per head at two widths": Case(
        {"o": TURNED},
        (T, "a, c = pairs(t)", "return {'o': join(a * per_head(f), c) * per_head(f)}"),
        6,
        ("meets tiles of two widths: the second time write per_head(1 * v)",),
        (T, "a, c = pairs(t)", "return {'o': join(a * per_head(1 * f), c) * per_head(f)}"),
    ),
    "per head of a computed tile": Case(
        {"o": TURNED},
        (T, "o = t * per_head(cs * 2)", "return {'o': o}"),
        5,
        ("per_head takes a tile only if it is an input: compute with the spread tile instead",),
        (T, "return {'o': t * (per_head(cs) * 2)}"),
    ),
    "statistics from memory": Case(
        {"o": TURNED},
        (T, "o = t * per_head(stat)", "return {'o': o}"),
        5,
        ("per_head of an input [M, W] repeats its W columns", "only where this kernel's head_sums made it"),
        (T, "return {'o': t * per_head(head_sums(t, 2 * P))}"),
    ),
    "rotated back before its gemm": Case(
        {"o": tensor("M, D")},
        ("d = rope(z, p, -f)", "o = gemm(d, wo)", "return {'o': o}"),
        4,
        ("an operand is an input, an earlier gemm's tile", "in a PyTorch op before the kernel"),
        ("return {'o': gemm(z, wo)}",),
    ),
}  # fmt: skip


def given(case: Case, outputs: dict[str, TensorType]) -> Signature:
    """Return the signature of the case's kernel with ``outputs``."""
    inputs, static = (HEADS, ("P",)) if case in HEADED.values() else (INPUTS, ())
    return signature(inputs, outputs, static)


@pytest.mark.parametrize("case", [*TILES.values(), *HEADED.values()], ids=[*TILES, *HEADED])
def test_what_is_refused_says_what_to_write_and_that_runs(case: Case) -> None:
    declared = given(case, case.outputs)
    with pytest.raises(ProgramError) as caught:
        trace_source(source(declared, *case.lines), declared)
    assert [words for words in case.words if words not in caught.value.message] == [], caught.value.message
    assert caught.value.line == case.line
    declared = given(case, case.others or case.outputs)
    found = interpret(trace(declared, *case.instead), draw(declared, SIZES))
    for name, output in declared.outputs.items():
        assert found[name].shape == tuple(d(SIZES) for d in output.shape)


@pytest.mark.parametrize("name", ["select from half", "head sums of half"])
def test_the_suggestion_is_the_same_sum(name: str) -> None:
    """If a message suggests another way to compute the same value, the suggested program agrees with
    PyTorch."""
    case = (TILES | HEADED)[name]
    declared = given(case, case.outputs)
    inputs = draw(declared, SIZES)
    t = (inputs["x"].float() @ inputs["w2"].float().mT)[:, 0::2]
    if name == "select from half":
        inside = (inputs["i"] >= 0) & (inputs["i"] < t.shape[1])
        picked = t.gather(1, inputs["i"].where(inside, 0).long()[:, None])[:, 0]
        expected = picked.where(inside, 0.0)
    else:
        t = t * (inputs["x"].float() @ inputs["w2"].float().mT)[:, 1::2]
        expected = t.unflatten(1, (2, -1)).sum(-1)
    torch.testing.assert_close(interpret(trace(declared, *case.instead), inputs)["o"], expected)


def test_an_outputs_line_is_that_of_its_entry() -> None:
    declared = signature(INPUTS, {"o": TILE, "s": ROW})
    written = (H, "return {", "    'o': h,", "    's': column_sums(h),", "}")
    helped = (H, "o = {'o': h}", "o['s'] = h", "return o")
    for lines, line in ((written, 7), (helped, 7), ((H, "return {'o': h}"), 5), ((H, "h * 2"), 3)):
        with pytest.raises(ProgramError) as caught:
            trace_source(source(declared, *lines), declared)
        assert caught.value.code in ("output_shape", "outputs") and caught.value.line == line


@pytest.mark.parametrize("made", ["row_sums(r)", "column_max(r)", "row_select(r, i)"])
def test_a_reduction_of_an_input_is_refused_where_it_stands(made: str) -> None:
    """The refusal names the line of the reduction. It does not name the line of ``@kernel``, where inputs are
    created, or the line that first reads the input."""
    declared = signature(INPUTS, {"o": tensor("M, N"), "s": tensor("N" if "column" in made else "M", "fp32")})
    with pytest.raises(ProgramError) as caught:
        trace_source(
            source(declared, "g = gemm(r, q)", H, f"s = {made}", "return {'o': h + g, 's': s}"), declared
        )
    assert (caught.value.code, caught.value.line) == ("homeless", 6)


def test_of_two_head_statistics_the_refused_one_is_named() -> None:
    declared = signature(HEADS, {"a": STAT, "b": STAT, "c": STAT}, ("P",))
    lines = (
        T,
        "a = head_sums(t * t, 2 * P)",
        "b = head_sums(t + z, 2 * P)",
        "return {'a': a, 'b': b, 'c': head_sums(t, 2 * P)}",
    )
    with pytest.raises(ProgramError) as caught:
        trace_source(source(declared, *lines), declared)
    assert (caught.value.code, caught.value.line) == ("sweep", 6)


@pytest.mark.parametrize("example", [QK_NORM, ROPE])
def test_the_widths_of_heads_that_fit_are_those_with_a_tile(example: Example) -> None:
    (kernel,) = lower(example.program).gemms
    found = {2 * pairs for pairs in range(1, 257) if candidates(kernel, {"P": pairs})}
    assert set(kernel.fitting()) == found and max(found) == (256 if example is QK_NORM else 512)


def test_the_contract_names_the_line_and_the_widths_that_fit(tmp_path: Path) -> None:
    text = (SPECS / "gemm_qk_norm_rope.yaml").read_text(encoding="utf-8")
    path = write_changed(tmp_path / "gemm_qk_norm_rope.yaml", text, "H: 32, P: 32}", "H: 4, P: 256}")
    kernel = (KERNELS / "gemm_qk_norm_rope.py").read_text(encoding="utf-8")
    report = check(load(path), kernel).report
    assert isinstance(report, Rejected) and report.code == "heads"
    assert "whole heads of 512 columns" in report.message
    assert report.message.endswith("; heads of 32, 64, 96, 128, 160, 192, 224, 256 columns of the gemm fit")
    assert report.line and "head_sums" in kernel.splitlines()[report.line - 1]


def test_the_contract_names_the_line_and_column_of_a_range_inside_a_stage(tmp_path: Path) -> None:
    text = (SPECS / "gemm_qkv_rope.yaml").read_text(encoding="utf-8")
    path = write_changed(tmp_path / "gemm_qkv_rope.yaml", text, "H: 3,  G: 2, P: 16", "H: 3,  G: 2, P: 8")
    kernel = (ROOT / "tests/honest/gemm_qkv_rope/plain.py").read_text(encoding="utf-8")
    report = check(load(path), kernel).report
    assert isinstance(report, Rejected) and (report.gate, report.code) == ("contract", "range")
    assert "ranges from columns 48, 80 on" in report.message
    assert report.line and "column_range" in kernel.splitlines()[report.line - 1]


@pytest.mark.parametrize(
    ("shape", "reader"), [("K: 519, N: 776", "gemm(a, b)"), ("K: 520, N: 777", "gemm(a, b)")]
)
def test_the_contract_names_the_line_that_reads_what_does_not_align(
    tmp_path: Path, shape: str, reader: str
) -> None:
    spec = load(write_toy(tmp_path, "M: 1000, K: 520, N: 776", f"M: 1000, {shape}"), check=False)
    report = check(spec, TOY_KERNEL).report
    assert isinstance(report, Rejected) and (report.gate, report.code) == ("contract", "alignment")
    assert report.line and reader in TOY_KERNEL.splitlines()[report.line - 1]
