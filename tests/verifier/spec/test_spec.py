"""Tests of how specs load, of the sizes that they derive from shapes, and of their hashes. Every kind of
mistake gives one message with the line of the mistake."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from spec_files import fails, write_changed

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import solve_sizes
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import reference
from coda_agent.verifier.numerics.trial import check_reference
from coda_agent.verifier.numerics.values import DTYPES
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import BadReference, Spec

SHIPPED = sorted(p.stem for p in (ROOT / "specs").glob("*.yaml"))

GOOD = """\
name: scaled
summary: A matmul, scaled.
dims: {M: rows, K: inner, N: columns}
inputs:
  a: {shape: [M, K], dtype: fp16}
  b: {shape: [2*N, K], dtype: fp16, init: {normal: {std: K**-0.5}}}
  scale: {shape: [M], dtype: fp32, init: {uniform: [0.5, 1.5]}}
  old: {shape: [M, 2*N], dtype: fp16}
constants: {eps: 1e-6}
outputs:
  c: {shape: [M, 2*N], dtype: fp16, updates: old}
  r: {shape: [M], dtype: fp32}
static: [K]
reference: |
  # a comment
  c = (a @ b.mT) * scale[:, None] + old
  r = rsqrt((c * c).mean(-1) + eps)
cases:
  - {name: small, M: 8, K: 16, N: 4}
  - name: large
    M: 64
    K: 16
    N: 12
    bench: false
accept: {speedup: 1.1}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes the spec ``GOOD``, with ``old`` replaced by ``new``, to scaled.yaml. The
    function returns the file's relative path."""
    monkeypatch.chdir(tmp_path)
    return partial(write_changed, Path("scaled.yaml"), GOOD)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_specs_load(name):
    spec = load(ROOT / "specs" / f"{name}.yaml")
    assert spec.name == name
    experts = "E" in spec.dims
    models = {"qwen3-30b", "mixtral-8x7b"} if experts else {"1B", "7B", "70B"}
    assert {case.name for case in spec.cases} >= models | {"decode", "ragged"}
    assert experts or all(case.sizes["M"] == 16384 for case in spec.cases if case.decides)
    assert spec.case("decode").bench == "report" and not spec.case("ragged").bench
    summed = any(output.updates for output in spec.outputs.values())  # an update is a sum over M
    assert reference.row_dim(spec) == (None if summed else ("M" if "M" in spec.dims else "T", False))


def test_parts_of_a_good_spec(write):
    spec = load(write())
    assert spec.inputs["b"].shape == (Dim.parse("2*N"), Dim.parse("K"))
    assert spec.inputs["b"].init.normal.at({"K": 16}) == 0.25
    assert spec.inputs["a"].init.normal.at({"K": 16}) == 1.0
    assert spec.inputs["scale"].init.uniform == (0.5, 1.5)
    assert spec.outputs["c"].updates == "old" and spec.static == ("K",)
    assert spec.case("large").sizes == {"M": 64, "K": 16, "N": 12} and not spec.case("large").bench
    assert spec.accept.speedup == 1.1 and spec.constants == {"eps": 1e-6}


def test_signature_survives_json(write):
    signature = load(write()).signature()
    assert type(signature).from_json(signature.to_json()) == signature
    assert signature.outputs["c"].dtype == "fp16" and signature.dims == ("M", "K", "N")


def test_loading_without_check_needs_no_torch(write):
    code = (
        "import sys; from coda_agent.verifier.loading import load; load({!r}, check=False); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code.format(str(write()))]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("accept:", "acept:", 25, "unknown key 'acept'; did you mean 'accept'?"),
        ("dtype: fp16, updates", "dtyp: fp16, updates", 11, "unknown key 'dtyp'; did you mean 'dtype'?"),
        ("fp16", "bfloat", 5, "dtype 'bfloat' is unknown; use one of bf16, fp16, fp32"),
        ("2*N, K]", "2*L, K]", 6, "dim 'L' is not declared; use one of K, M, N"),
        ("2*N, K]", "N/2, K]", 6, "'N / 2' is no integer polynomial"),
        ("2*N, K]", "1.5, K]", 6, "1.5 is no size"),
        ("2*N, K]", "N-9, K]", 6, "is -5 in case 'small'; it must be positive"),
        ("  scale:", "  a:", 7, 'duplicate key "a"; keep one of the two'),
        ("dtype: fp16, init", "dtype: fp16, dtype: bf16, init", 6, 'duplicate key "dtype"'),
        ("summary: A matmul, scaled.\n", "", 1, "summary is missing"),
        (", dtype: fp32}\nstatic", "}\nstatic", 12, "outputs.r.dtype is missing"),
        ("summary: A matmul, scaled.", "summary: 3", 2, "summary is 3; it must be text"),
        ("[M, K]", "M", 5, "shape is 'M'; it must be a list"),
        ("{speedup: 1.1}", "fast", 25, "accept is 'fast'; it must be a mapping"),
        ("speedup: 1.1", "speedup: quick", 25, "speedup is 'quick'; it must be a number"),
        ("speedup: 1.1", "speedup: 0", 25, "speedup 0.0 must be positive"),
        ("bench: false", "bench: no", 24, "bench is 'no'; it must be true, false or report"),
        (", K: 16, N: 4", ", N: 4", 19, "case 'small' gives no size for K"),
        ("    N: 12", "    N: 0", 23, "case 'large': N is 0; it must be a positive integer"),
        ("    N: 12", "    N: 12.0", 23, "case 'large': N is 12.0; it must be a positive integer"),
        ("    N: 12", "    N: true", 23, "case 'large': N is True; it must be a positive integer"),
        ("    M: 64", "    M: 1000000000", 20, "its tensors take 136 GB, and an H100 has 80 GB"),
        ("    bench: false", "    bnech: false", 24, "unknown key 'bnech'; did you mean 'bench'?"),
        ("name: large", "name: small", 20, "case 'small' occurs twice"),
        ("name: large", 'name: "hidden, one row"', 20, "the verifier's own sizes have such names"),
        ("  r = ", "  return 1\n  r = ", 17, "assign each output to its name"),
        ("  r = ", "  def f(t): t\n  r = ", 17, "write out what f computes"),
        ("columns}", "columns, H: heads}", 3, "dim 'H' follows from no input's shape"),
        ("dims: {M", "dims: {name: x, M", 3, "dim 'name' is not a name for a size"),
        ("scale: {shape", "Scale: {shape", 7, "'Scale' is not a name for a value"),
        ("eps: 1e-6", "lambda: 1e-6", 9, "'lambda' is not a name for a value"),
        ("eps: 1e-6", "a: 1e-6", 9, "'a' is already among the inputs"),
        ("eps: 1e-6", "eps: .inf", 9, "constant eps is inf; it must be finite"),
        ("eps: 1e-6", "eps: small", 9, "eps is 'small'; it must be a number"),
        ("static: [K]", "static: [Q]", 13, "static dim 'Q' is not declared"),
        (
            "updates: old",
            "updates: odl",
            11,
            "updates names 'odl', which is not an input; did you mean 'old'?",
        ),
        ("updates: old", "updates: a", 11, "c is fp16 [M, 2*N] but updates a, fp16 [M, K]"),
        ("std: K**-0.5", "std: Q**-0.5", 6, "dim 'Q' is not declared"),
        ("std: K**-0.5", "std: K - 16", 6, "is 0.0; it must be positive"),
        ("std: K**-0.5", "std: sqrt(K)", 6, "'sqrt(K)' is not arithmetic"),
        ("uniform: [0.5, 1.5]", "uniform: [1.5, 0.5]", 7, "must be finite, low then high"),
        ("uniform: [0.5, 1.5]", "uniform: [-3.0e+38, 3.0e+38]", 7, "too narrow or too wide"),
        ("uniform: [0.5, 1.5]", "uniform: [0.0, 1.0e-310]", 7, "too narrow or too wide"),
        ("dims: {M", f"dims: {{{', '.join(f'D{i}: x' for i in range(64))}, M", 3, "67 dims; give at most 64"),
        ("uniform: [0.5, 1.5]", "uniform: [0.5, 1.5, 2]", 7, "it must be a list of two numbers"),
        ("uniform: [0.5, 1.5]", "unifrom: [0.5, 1.5]", 7, "unknown key 'unifrom'; did you mean 'uniform'?"),
        ("accept: {", "tolerance: {factor: 2, reason: ' '}\naccept: {", 25, "a tolerance needs a reason"),
        ("accept: {", "tolerance: {factor: .nan, reason: x}\naccept: {", 25, "nan must be between 1 and 10"),
        ("  c = (a @", "  c = (a @@", 16, "reference: invalid syntax"),
        ("  # a comment", "  import os", 15, "remove the import"),
        ("  r = rsqrt", "  q = rsqrt", 14, "reference never assigns output 'r'; add a line 'r = ...'"),
        ("cases:\n", "cases: []\nother:\n", 19, "unknown key 'other'"),
        ("dims: {M", "dims: {M: [", 3, "this is not a YAML mapping"),
    ],
)
def test_a_mistake_is_named_with_its_line(write, old, new, line, words):
    message = fails(write(old, new), check=False)
    assert message.startswith(f"scaled.yaml:{line}: "), message
    assert words in message
    assert "\n" not in message


def test_a_reference_is_tried_in_the_dtypes_it_is_measured_in(write):
    other = ("b: {shape: [2*N, K], dtype: fp16", "b: {shape: [2*N, K], dtype: bf16")
    message = fails(write(*other))
    assert message.startswith("scaled.yaml:16: ") and "same dtype" in message
    assert message.endswith("give a baseline with casts")
    for product in ("(a @ b.mT.half())", "torch.mm(a, b.mT.half(), out_dtype=torch.float32)"):  # GPU only
        path = write(*other)
        lines = f"  c = {product} * scale[:, None] + old\n  r = rsqrt((c * c).mean(-1) + eps)\n"
        path.write_text(f"{path.read_text()}baseline: |\n{lines}")
        assert load(path).baseline


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("rsqrt(", "rsqt(", 17, "name 'rsqt' is not defined; did you mean 'rsqrt'?"),
        ("scale[:, None]", "scal[:, None]", 16, "name 'scal' is not defined; did you mean 'scale'?"),
        ("b.mT", "b", 16, "mat1 and mat2 shapes cannot be multiplied"),
        ("* scale[:, None]", "* scale", 16, "must match the size of tensor b"),
        (".mean(-1)", ".mean()", 14, "output 'r' has shape [], declared [M] = [6]"),
        ("rsqrt((c * c).mean(-1) + eps)", "3.0", 14, "output 'r' is float; it must be a floating"),
        ("(c * c)", "(c.cc)", 17, "no attribute 'cc'"),
        ("+ old", "+ dropout(old, 0.5)", 14, "reference: it draws random numbers"),
        ("+ old", "+ randn(M, 2 * N)", 14, "reference: it draws random numbers"),
        ("accept: {", "baseline: |\n  c = a\n  r = scale\naccept: {", 25, "baseline: output 'c' has shape"),
    ],
)
def test_a_reference_is_tried(write, old, new, line, words):
    path = write(old, new)
    assert isinstance(load(path, check=False), Spec)
    message = fails(path)
    assert message.startswith(f"scaled.yaml:{line}: "), message
    assert words in message


def test_files_that_are_no_spec(write):
    path = write()
    assert fails(Path("scaledd.yaml")).endswith("no such file; did you mean scaled.yaml?")
    assert fails(Path("zzzzzz.yaml")).endswith("no such file; . has scaled")
    assert "Is a directory" in fails(Path("."))
    for text, words in [
        ("", "is a mapping with keys"),
        ("- 1\n", "is a mapping with keys"),
        ("\0", "this is not a YAML mapping"),
    ]:
        path.write_text(text)
        assert fails(path).startswith("scaled.yaml:1: ") and words in fails(path)
    path.write_bytes(b"name: \xff")
    assert "not UTF-8 text: byte 6 is 0xff" in fails(path)


def test_every_shape_agrees_with_what_it_solves(write):
    spec = load(write())
    shapes = {"a": (8, 16), "b": (24, 16), "scale": (8,), "old": (8, 24)}
    assert solve_sizes(spec.signature(), shapes) == {"M": 8, "K": 16, "N": 12}
    with pytest.raises(ValueError, match=r"input 'b', axis 0: no positive N makes 2\*N = 25"):
        solve_sizes(spec.signature(), shapes | {"b": (25, 16)})
    with pytest.raises(ValueError, match=r"input 'old' has shape \(8, 22\)"):
        solve_sizes(spec.signature(), shapes | {"old": (8, 22)})


def test_dims_solve_through_one_another(write):
    path = write("[2*N, K]", "[N*K + N, K]")
    shapes = {"a": (8, 16), "b": (51, 16), "scale": (8,), "old": (8, 6)}
    assert solve_sizes(load(path, check=False).signature(), shapes) == {"M": 8, "K": 16, "N": 3}
    squared = load(write("[2*N, K]", "[N*N, K]"), check=False)  # the shape of the input old determines N
    assert solve_sizes(squared.signature(), shapes | {"b": (9, 16)}) == {"M": 8, "K": 16, "N": 3}
    path.write_text(GOOD.replace("2*N", "N*N"))
    assert "dim 'N' follows from no input's shape" in fails(path, check=False)


def test_static_dims_need_no_axis(write):
    path = write("columns}", "columns, H: heads}")
    text = path.read_text().replace("N: 4}", "N: 4, H: 5}").replace("N: 12\n", "N: 12\n    H: 5\n")
    path.write_text(text)
    assert "or make it static, which callers then name" in fails(path, check=False)
    path.write_text(text.replace("static: [K]", "static: [K, H]"))
    assert load(path, check=False).signature().named == ("H",)


def test_the_hash_sees_meaning_alone(write):
    first = load(write()).hash
    same = [
        ("  # a comment", "  # another"),
        ("(a @ b.mT) * scale", "((a@b.mT))  *  scale"),
        ("A matmul, scaled.", "Other words."),
        ("M: rows, K: inner", "K: innermost, M: rows"),
        ("accept:", "hints: try harder\naccept:"),
    ]
    other = [
        ("eps: 1e-6", "eps: 2e-6"),
        ("* scale", "/ scale"),
        ("M: 64", "M: 65"),
        ("fp16", "bf16"),
        ("speedup: 1.1", "speedup: 1.2"),
        ("[0.5, 1.5]", "[0.5, 1.25]"),
        (", updates: old", ""),
        ("accept:", "tolerance: {factor: 2, reason: fp8}\naccept:"),
    ]
    assert [load(write(*edit), check=False).hash == first for edit in same] == [True] * len(same)
    hashes = {load(write(*edit), check=False).hash for edit in other}
    assert len(hashes) == len(other) and first not in hashes


def test_an_operator_is_the_same_whatever_its_cases_and_what_is_good_enough(write):
    first = load(write()).operator_hash
    same = [
        ("M: 64", "M: 65"),
        ("speedup: 1.1", "speedup: 1.2"),
        ("accept:", "tolerance: {factor: 2, reason: fp8}\naccept:"),
    ]
    other = [
        ("eps: 1e-6", "eps: 2e-6"),
        ("* scale", "/ scale"),
        ("fp16", "bf16"),
        ("[0.5, 1.5]", "[0.5, 1.25]"),
    ]
    assert {load(write(*edit), check=False).operator_hash for edit in same} == {first}
    assert first not in {load(write(*edit), check=False).operator_hash for edit in other}


def spec_of(reference_text: str, outputs: str, write) -> Spec:
    path = write()
    head, tail = GOOD.split("outputs:\n")[0], GOOD[GOOD.index("cases:") :]
    text = "\n  ".join(reference_text.splitlines())
    path.write_text(f"{head}outputs:\n  {outputs}\nreference: |\n  {text}\n{tail}")
    return load(path)


@pytest.mark.parametrize(
    ("text", "outputs", "expected"),
    [
        ("c = a @ b.mT", "c: {shape: [M, 2*N], dtype: bf16}", ("M", False)),
        ("c = old.mT @ a", "c: {shape: [2*N, K], dtype: fp32}", ("M", False)),
        ("c = a.sum(0) / M", "c: {shape: [K], dtype: fp32}", ("M", True)),
        ("c = a.reshape(M, 1, K).sum(1)", "c: {shape: [M, K], dtype: fp32}", ("M", False)),
        ("c = a - a.mean(0)", "c: {shape: [M, K], dtype: fp32}", None),
        ("c = a.cumsum(0)", "c: {shape: [M, K], dtype: fp32}", None),
    ],
)
def test_blocks_only_where_they_give_the_same(write, monkeypatch, text, outputs, expected):
    spec = spec_of(text, outputs, write)
    assert reference.row_dim(spec) == expected
    sizes = {"M": 300, "K": 7, "N": 5}
    inputs = {
        name: torch.randn([d(sizes) for d in t.shape], generator=torch.Generator().manual_seed(3)).to(
            DTYPES[t.dtype]
        )
        for name, t in spec.inputs.items()
    }
    whole, yard = reference.oracle(spec, inputs, sizes), reference.yardstick(spec, inputs, sizes)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 1)  # three blocks of rows: 128, 128, 44
    assert (reference._rows(spec, sizes) is None) == (expected is None)
    blocked = reference.oracle(spec, inputs, sizes)["c"]
    torch.testing.assert_close(blocked, whole["c"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reference.yardstick(spec, inputs, sizes)["c"], yard["c"])


def test_a_reference_of_a_spec_made_in_python_is_checked(write):
    spec = load(write())
    broken = spec.model_copy(update={"reference": "c = a\nr = scale"})
    with pytest.raises(BadReference, match="output 'c' has shape"):
        check_reference(broken)


@pytest.mark.parametrize(
    "text", ["name: 2026-13-45\n", "name: !!int abc\n", "name: !!float abc\n", "[" * 1100]
)
def test_yaml_that_cannot_be_built_is_one_message(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="this is not a YAML mapping|this YAML cannot be read"):
        load(path, check=False)


@pytest.mark.parametrize("line", ["scale += 1", "scale.mul_(2)", "a[0] = 0"])
def test_a_reference_that_writes_to_an_input_is_refused(write, line):
    """The yardstick's run would otherwise change fp32 inputs before the kernel reads them."""
    spec = write("  # a comment\n", f"  {line}\n")
    with pytest.raises(SpecError, match="it writes to its input '(scale|a)'"):
        load(spec)


@pytest.mark.parametrize("wrong", ["old - (a @ b.mT)", "2 * (a @ b.mT)"])
def test_a_baseline_that_computes_something_else_is_refused(write, wrong):
    text = f"baseline: |\n  c = {wrong}\n  r = rsqrt((c * c).mean(-1) + eps)\n"
    with pytest.raises(SpecError, match=r"baseline: output 'c' differs from the reference's by "):
        load(write("cases:\n", f"{text}cases:\n"))


def test_a_baseline_may_lose_what_saturates_where_inputs_are_not_typical(write):
    """Near 1, where the first inputs of a trial lie, fp16 rounds the sigmoid to 1."""
    path = write("c = (a @ b.mT) * scale[:, None] + old", "c = 100 * (1 - sigmoid(a @ b.mT)) + 0 * old")
    text = path.read_text()
    for factor in (100, 50):
        body = f"c = {factor} * (1 - sigmoid(a @ b.mT))\n  r = rsqrt((c * c).mean(-1) + eps)"
        path.write_text(text.replace("cases:\n", f"baseline: |\n  {body}\ncases:\n"))
        if factor == 100:
            load(path)
        else:
            assert "baseline: output 'c' differs" in fails(path)


def test_a_baseline_may_write_to_an_updated_input(write):
    text = "baseline: |\n  c = old.add_((a @ b.mT) * scale[:, None])\n  r = rsqrt((c * c).mean(-1) + eps)\n"
    load(write("cases:\n", f"{text}cases:\n"))
    with pytest.raises(SpecError, match="baseline: it writes to its input 'scale'"):
        load(write("cases:\n", f"{text}  scale += 1\ncases:\n"))


BODY = "  # a comment\n  c = (a @ b.mT) * scale[:, None] + old\n  r = rsqrt((c * c).mean(-1) + eps)\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("reference:\n  |\n  c = a @ b.mT\n  r = typo\n", 17),
        ("reference: >\n  c = (a\n  @ b.mT)\n\n  r = typo\n", 14),
        ('reference: "c = a @ b.mT\\nr = typo"\n', 14),
        ("reference:\n  c = a @ b.mT\n\n  r = typo\n", 15),
    ],
)
def test_an_error_in_a_text_has_a_line_of_the_text(write, text, line):
    with pytest.raises(SpecError) as caught:
        load(write(f"reference: |\n{BODY}", text))
    assert caught.value.line == line


@pytest.mark.parametrize("domain", ["[-.inf, .inf]", "[.nan, 1]"])
def test_an_infinite_bound_is_not_taken_for_a_dim(write, domain):
    spec = write("a: {shape: [M, K], dtype: fp16}", f"a: {{shape: [M, K], dtype: fp16, domain: {domain}}}")
    with pytest.raises(SpecError, match="is empty or not finite"):
        load(spec)
