"""Specs with every kind of input (scalars, indices, fp8, series), with static dims, and with cases that
are measured but do not decide."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from spec_files import fails, write_changed

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import solve_sizes
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import reference
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.numerics.values import trial
from coda_agent.verifier.spec.model import Spec

WIDE = """\
name: wide
summary: A matmul of fp8, with every kind of input.
dims: {M: rows, K: inner, N: columns}
inputs:
  a: {shape: [M, K], dtype: fp8_e4m3}
  b: {shape: [N, K], dtype: fp8_e4m3}
  scale: {shape: [], dtype: fp32}
  target: {shape: [M], dtype: int64, init: {integers: [0, N], ignored: -100}, domain: [0, N - 1]}
  position: {shape: [M], dtype: int32, init: {count: 4*K}}
  series: {shape: [N], dtype: fp32, init: {geometric: [1.0, 1.0e-4]}}
  old: {shape: [M], dtype: fp32}
static: [K]
outputs:
  c: {shape: [M, N], dtype: bf16}
  t: {shape: [M], dtype: fp32, updates: old}
reference: |
  c = a @ b.mT * scale + position[:, None] * series
  t = where(target >= 0, c.gather(1, target.clamp(min=0)[:, None])[:, 0], old)
baseline: |
  product = torch._scaled_mm(a, b.mT, scale_a=scale, scale_b=scale * 0 + 1, out_dtype=torch.bfloat16)
  c = product + position[:, None] * series
  t = where(target >= 0, c.gather(1, target.clamp(min=0)[:, None])[:, 0], old)
cases:
  - {name: small, M: 8, K: 16, N: 8}
  - {name: decode, M: 1, K: 16, N: 8, bench: report}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function of two texts. It writes the spec ``WIDE`` to wide.yaml, with the first text replaced
    by the second, and returns the file's relative path."""
    monkeypatch.chdir(tmp_path)
    return partial(write_changed, Path("wide.yaml"), WIDE)


def test_what_a_processor_s_kernel_lacks_is_no_mistake_of_the_baseline_s(write, monkeypatch):
    """On some CPUs, oneDNN computes the scaled matmul, and accepts fewer kinds of scales than a GPU. If
    oneDNN refuses the scales of a baseline, the baseline must still be valid."""

    def lacking(*_: object, **__: object) -> None:
        raise RuntimeError('Linear.cpp":516, INTERNAL ASSERT FAILED: only scalar scales, please report a bug')

    monkeypatch.setattr("torch._scaled_mm", lacking)
    assert load(write()).baseline
    monkeypatch.setattr("torch._scaled_mm", lambda *_, **__: 1 / 0)
    assert "division by zero" in fails(write())


def test_parts_of_a_wide_spec(write):
    spec = load(write())
    init = {name: tensor.init for name, tensor in spec.inputs.items()}
    assert {name: i.form for name, i in init.items()} == {
        "a": "normal", "b": "normal", "scale": "normal",
        "target": "integers", "position": "count", "series": "geometric", "old": "normal",
    }  # fmt: skip
    sizes = {"M": 8, "K": 16, "N": 8}
    assert init["target"].range_at(sizes) == (0, 7) and init["position"].range_at(sizes) == (0, 63)
    shapes = {name: tuple(d(sizes) for d in t.shape) for name, t in spec.signature().inputs.items()}
    assert solve_sizes(spec.signature(), shapes, {"K": 16}) == sizes
    small, decode = spec.cases
    assert small.decides and decode.bench == "report" and not decode.decides


def test_static_dims_and_updates_reach_the_signature(write):
    wide = load(write()).signature()
    assert wide.static == ("K",) and wide.updates == {"t": "old"} and wide.inputs["scale"].shape == ()
    assert [wide.inputs[n].dtype for n in ("a", "target", "position")] == ["fp8_e4m3", "int64", "int32"]
    assert type(wide).from_json(wide.to_json()) == wide


def test_the_integer_after_a_range_may_be_the_ignored_one(write):
    spec = load(write("ignored: -100", "ignored: 8"), check=False)  # 8 is N, and the range is [0, N)
    assert spec.inputs["target"].init.ignored == 8


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("dtype: bf16}", "dtype: int32}", 14, "output c is a matrix of int32; it may be bf16, fp16,"),
        ("fp32, updates: old", "fp8_e4m3, updates: old", 15, "t is a vector of fp8_e4m3; it may be bf16"),
        ("  t: {shape: [M]", "  t: {shape: []", 15, "output t has 0 axes; give it one, two or"),
        ("[M], dtype: int64", "[M, N], dtype: int64", 8, "target is a matrix of int64; a matrix may be"),
        ("scale: {shape: [], dtype: fp32", "scale: {shape: [], dtype: bf16", 7, "scalar may be fp32"),
        ("[N], dtype: fp32", "[N], dtype: fp8_e4m3", 10, "series is a vector of fp8_e4m3; a vector may be"),
        ("series: {shape: [N]", "series: {shape: [N, N, N, N]", 10, "series has 4 axes; give it at most"),
        (", init: {count: 4*K}", "", 9, "position is int32: give init {integers: [0, V]}, {count: 8192} or"),
        ("{count: 4*K}", "{uniform: [0, 9]}", 9, "position is int32: give init"),
        ("scale: {shape: [], dtype: fp32", "scale: {shape: [], dtype: fp32, init: {integers: [0, 2]}", 7,
         "scale is fp32: integers are for int32 and int64; use normal or uniform"),
        ("integers: [0, N]", "integers: [N, 8]", 8, "integers ['N', 8] is 8 to 8; low must be less"),
        ("integers: [0, N]", "integers: [0, N/3]", 8, "'N/3' is 2.666"),
        ("integers: [0, N]", "integers: [0, V]", 8, "dim 'V' is not declared"),
        ("integers: [0, N]", "integers: [0]", 8, "is missing"),
        ("integers: [0, N]", "integers: [0, 2.5]", 8, "is 2.5; it must be an integer"),
        ("ignored: -100", "ignored: 2", 8, "ignored 2 lies within 0 to 7; choose a value outside"),
        ("{count: 4*K}", "{count: 4*K, ignored: 3}", 9, "ignored works only with integers"),
        ("{count: 4*K}", "{count: 4*K, integers: [0, 3]}", 9, "init takes one form"),
        ("{count: 4*K}", "{count: K - 16}", 9, "count 'K - 16' is 0; it must be at least 1 in case 'small'"),
        ("{count: 4*K}", "{count: K**9}", 9, "does not fit int32"),
        ("[1.0, 1.0e-4]", "[1.0, 0]", 10, "geometric [1.0, 0.0] must be positive and finite"),
        ("updates: old}", "updates: old}\n  u: {shape: [M], dtype: fp32, updates: old}", 16,
         "input 'old' is already updated by 't'"),
        ("static: [K]", "static: [K, K]", 12, "static names dim 'K' twice"),
        ("bench: report", "bench: reprot", 25, "bench is 'reprot'; it must be true, false or report"),
        ("baseline:", "hints:", 5, "a is fp8_e4m3, which torch.matmul does not take: give a baseline with"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_wide_spec_is_named_with_its_line(write, old, new, line, words):
    message = fails(write(old, new), check=False)
    assert message.startswith(f"wide.yaml:{line}: "), message
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("out_dtype=torch.bfloat16", "out_type=torch.bfloat16", 20, "unexpected keyword argument 'out_type'"),
        ("b.mT, scale_a", "b, scale_a", 20, "tried with a [6, 10], b [14, 10]"),
        ("target.clamp(min=0)", "(target + N)", 18, "out of bounds"),
    ],
)
def test_a_wide_reference_is_tried(write, old, new, line, words):
    message = fails(write(old, new))
    assert message.startswith(f"wide.yaml:{line}: "), message
    assert words in message


def test_a_range_that_is_empty_in_a_trial_is_named(write):
    path = write("[0, N]", "[0, N - 1000]")
    path.write_text(path.read_text().replace("N: 8", "N: 2000"))
    assert isinstance(load(path, check=False), Spec)
    message = fails(path)
    assert message.startswith("wide.yaml:4: input 'target': integers [0, 'N - 1000'] is 0 to -986")
    assert message.endswith("at the tiny sizes of a trial; write it in dims")


def test_the_hash_of_a_wide_spec_sees_meaning_alone(write):
    first = load(write()).hash
    other = [
        ("[0, N]", "[0, 4]"),
        ("-100", "-99"),
        (", ignored: -100", ""),
        ("4*K", "2*K"),
        ("1.0e-4", "1.0e-5"),
        ("static: [K]", "static: [N]"),
        ("static: [K]\n", ""),
        ("bench: report", "bench: true"),
        ("bench: report", "bench: false"),
        ("scale * 0 + 1", "scale / scale"),
        ("int32", "int64"),
        (", updates: old", ""),
    ]
    hashes = {load(write(*edit), check=False).hash for edit in other}
    assert len(hashes) == len(other) and first not in hashes
    both = {load(write("static: [K]", f"static: [{x}]"), check=False).hash for x in ("N, K", "K, N")}
    assert len(both) == 1


def test_a_trial_is_of_distinct_sizes_and_valid_indices(write):
    spec = load(write())
    sizes, inputs = trial(spec)
    assert len(set(sizes.values())) == 3 and all(size % 2 == 0 for size in sizes.values())
    assert {name: list(t.shape) for name, t in inputs.items()} == {
        name: [d(sizes) for d in t.shape] for name, t in spec.inputs.items()
    }
    assert inputs["a"].dtype == inputs["scale"].dtype == torch.float64
    target = inputs["target"].tolist()
    assert inputs["target"].dtype == torch.int64 and set(target) <= {-100, *range(sizes["N"])}
    assert target[-1] == -100 and len(set(target)) > 2
    assert inputs["position"].dtype == torch.int32 and inputs["position"].tolist() == [0, 1, 2, 3, 4, 5]


def test_fp8_matrices_that_no_gemm_can_read_are_refused(write):
    message = fails(write("b: {shape: [N, K]", "b: {shape: [K, N]"), check=False)
    assert message.startswith("wide.yaml:5: input a is fp8") and "w as [N, K]" in message


def test_a_case_whose_rows_no_bulk_copy_reads_is_refused(write):
    message = fails(write("K: 16, N: 8, bench", "K: 24, N: 8, bench"))
    assert message.startswith("wide.yaml:24: case 'decode' gives a rows of 24 fp8_e4m3"), message
    message = fails(write("K: 16, N: 8, bench", "K: 16, N: 12, bench"))
    assert message.startswith("wide.yaml:24: case 'decode' gives c rows of 12 bf16"), message


SWAPS = """\
name: swaps
summary: A product whose adjacent columns change places.
dims: {M: rows, K: inner, H: heads, W: width}
inputs:
  x: {shape: [M, K], dtype: bf16}
  w: {shape: [H*W, K], dtype: bf16}
outputs:
  y: {shape: [M, H*W], dtype: bf16}
static: [H, W]
reference: |
  z = x @ w.mT
  y = z.unflatten(1, (H, W // 2, 2)).flip(-1).flatten(1)
cases:
  - {name: small, M: 8, K: 16, H: 2, W: 16}
"""


@pytest.mark.parametrize(("pairs", "needed"), [("(H, W // 2, 2)", "W"), ("(-1, 2)", "H or W")])
def test_a_reference_that_needs_an_even_width_is_refused_until_its_shapes_say_so(tmp_path, pairs, needed):
    path = write_changed(tmp_path / "swaps.yaml", SWAPS, "(H, W // 2, 2)", pairs)
    message = fails(path)
    assert message.partition(": ")[0].endswith("swaps.yaml:12")
    assert f"needs {needed} to be a multiple of 2," in message and f"2*P for {needed}" in message
    text = path.read_text().replace("W // 2", "P").replace("H*W", "H*2*P").replace("W:", "P:")
    path.write_text(text.replace("[H, W]", "[H, P]"))
    assert load(path).signature().outputs["y"].shape[1] == Dim.parse("2*H*P")


@pytest.mark.parametrize(
    ("reference", "needed"),
    [
        ("y = z.unflatten(1, (H, W // 96, 96)).flatten(1)", "W to be a multiple of 96,"),
        ("y = z.unflatten(1, (-1, 64)).flip(-1).flatten(1)", "H or W to be a multiple of 64,"),
        (
            "y = z.unflatten(1, (H // 2, 2, -1)).unflatten(0, (-1, 2)).flatten(2).flatten(0, 1)",
            "M and H to be a multiple of 2,",
        ),
    ],
)
def test_the_multiple_that_a_reference_needs_is_in_the_message(tmp_path, reference, needed):
    line = "y = z.unflatten(1, (H, W // 2, 2)).flip(-1).flatten(1)"
    message = fails(write_changed(tmp_path / "swaps.yaml", SWAPS, line, reference))
    assert f"needs {needed}" in message, message


def test_blocks_of_a_wide_spec_change_nothing(write, monkeypatch):
    spec, sizes = load(write()), {"M": 300, "K": 20, "N": 12}  # position restarts after 80 rows
    inputs = draw(spec, sizes, seed=1)
    whole, yard = reference.oracle(spec, inputs, sizes), reference.yardstick(spec, inputs, sizes)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 1)
    assert reference._rows(spec, sizes) == (("M", False), 128)
    for name, value in reference.oracle(spec, inputs, sizes).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(reference.yardstick(spec, inputs, sizes)[name], yard[name])


LEAN = {
    "name": "lean",
    "summary": "Logits that no output holds.",
    "dims": {"M": "rows", "D": "width", "V": "vocabulary"},
    "inputs": {"x": {"shape": ("M", "D"), "dtype": "bf16"}, "w": {"shape": ("V", "D"), "dtype": "bf16"}},
    "outputs": {"lse": {"shape": ("M",), "dtype": "fp32"}},
    "reference": "lse = logsumexp(x @ w.mT, -1)",
    "cases": ({"name": "one", "M": 16384, "D": 8, "V": 128256},),
}


def test_blocks_count_what_is_made_on_the_way():
    spec = Spec.model_validate(LEAN)
    row, rows = reference._rows(spec, spec.cases[0].sizes)
    assert row == ("M", False) and rows == 256  # 348 rows of six fp64 tensors fill 2 GiB; 2 * 128 rows fit
    for fits in ({"M": 16384, "D": 8, "V": 1000}, {"M": 256, "D": 8, "V": 128256}):
        assert reference._rows(spec, fits) is None


def test_a_reference_whose_way_depends_on_numbers_still_runs():
    text = "lse = x[:, 0] * 1\nfor i in range(len(w[w.sum(1) > 0])):\n  lse = lse + 1"
    spec, sizes = Spec.model_validate({**LEAN, "reference": text}), {"M": 6, "D": 8, "V": 10}
    x, w = torch.ones(6, 8), torch.tensor([[1.0], [-1.0]]).repeat(5, 8)
    truth = reference.oracle(spec, {"x": x.bfloat16(), "w": w.bfloat16()}, sizes)
    assert truth["lse"].tolist() == [6.0] * 6
