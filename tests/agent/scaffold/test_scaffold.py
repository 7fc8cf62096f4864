"""``coda-agent new`` writes a valid spec that computes what the function computes. If the command refuses a
function, the error names the line."""

from __future__ import annotations

import ast
import importlib.util
import io
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from authoring import RECORDINGS
from checkout import ROOT

from benchmarks.operators import OPTIONS
from coda_agent.agent.cli import main
from coda_agent.agent.scaffold.function import read
from coda_agent.agent.scaffold.torch_names import _math_value
from coda_agent.agent.storage.journal import read_export
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.numerics.reference import run
from coda_agent.verifier.numerics.values import DTYPES
from coda_agent.verifier.spec.model import Spec

OPS = '''\
import math

import torch
import torch.nn.functional as F
from torch import Tensor

CAP = 30.0


def norm_matmul(x: Tensor, gamma, w, eps: float = 1e-6):
    """RMSNorm,
    then a projection: as Llama has it.

    Not in the summary.
    """
    input_dtype = x.dtype
    # statistics in fp32
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * gamma).to(input_dtype) @ w.T


def swiglu(x, w):
    import torch.nn.functional as G

    z = (x @ w.mT) * 1.0  # both halves
    gate, up = z[:, 0::2], z[:, 1::2]
    return {"preact": z, "act": G.silu(gate) * up}


def two(y, w, x, alpha=0.5):
    h: Tensor = alpha * (y @ w.mT) + x
    return h, (h * h).sum(-1, dtype=torch.float32)


def rotated(x, w, cos, sin, *, P: int = 32, times: int = 3):
    even, odd = (x @ w.mT).unflatten(1, (-1, P, 2)).unbind(-1)
    c, s = cos[:, None], sin[:, None]
    turned = torch.stack((even * c - odd * s, even * s + odd * c), -1)
    return times * turned.flatten(1)


def capped_loss(x, w, target):
    assert x.shape[1] == w.shape[1]
    silu = math.sqrt(4.0) * math.pi  # hides the function of that name
    logits = CAP * F.tanh(x @ w.mT / CAP) + 0 * F.silu(x @ w.mT) * silu
    picked = logits.float().gather(1, target[:, None])[:, 0]
    return {"loss": logits.logsumexp(-1) - picked, "x": x * 2}


act = F.silu
square = lambda v: v * v


def gated(value, /, gate, *, slope=1.0, cap=None):
    """Of two halves."""
    return act(slope * gate) * (value if cap is None else value.clamp(max=cap))


def rms(v, eps):
    return v * torch.rsqrt(square(v.float()).mean(-1, keepdim=True) + eps)


@torch.no_grad()
def mlp(x, w, bias=None, *, scale: Tensor | None = None, eps: float = 1e-6):
    """A gated projection."""
    if scale is not None:
        # a scale for every row
        x = x * scale[:, None]
    elif bias is not None and x.shape[0] > 1:
        x = x - 1
    else:
        x = x * 1.0  # nothing to scale by
    h = F.linear(x, w, bias)
    # statistics in fp32
    h = h.float()
    h = rms(h, eps) if bias is None else rms(h + bias, eps)
    for _ in range(2):
        if not bias:
            h = h + square(h * 0.5)
    gate, up = h.chunk(2, dim=-1)
    return gated(up, gate, slope=2.0).to(x.dtype)


def biased(x, w, bias=None):
    if bias is None:
        return x @ w.T
    return x @ w.T + bias
'''
SHAPES = {
    "norm_matmul": {"x": "M,K", "gamma": "K", "w": "[N, K]"},
    "swiglu": {"x": "M,D", "w": "2*F,D"},
    "two": {"y": "M,K", "w": "N,K", "x": "M,N"},
    "rotated": {"x": "M,K", "w": "2*H*P,K", "cos": "M,P", "sin": "M,P"},
    "capped_loss": {"x": "M,D", "w": "V,D", "target": "M"},
    "mlp": {"x": "M,D", "w": "2*F,D"},
    "biased": {"x": "M,D", "w": "N,D", "bias": "N"},
}
SIZES = {"M": 24, "K": 16, "D": 16, "N": 40, "F": 8, "H": 3, "P": 4, "V": 48}


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


Command = Callable[..., Done]


LOW = """\
LEAST = -30.0
HALF: float = -0.5

def centered(v, axis=-1):
    return v - v.mean(axis, keepdim=True)

def low(x, w):
    z = (x @ w.mT).clamp(min=LEAST) * HALF ** 2
    return centered(z)
"""
HEADS = """\
import math

import torch


def split(x, w, gain, H: int, G: int, W: int):
    q, kv = (x @ w.mT).split([H * W, 2 * G * W], dim=1)
    return math.log(2.0) * q, (kv.unflatten(1, (2 * G, W)) * gain).flatten(1)
"""


@pytest.fixture
def new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Return a function that runs ``coda-agent new`` in the folder of ops.py, with ``answers`` on stdin."""
    monkeypatch.chdir(tmp_path)
    Path("ops.py").write_text(OPS)

    def command(*arguments: str, answers: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["coda-agent", "new", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return command


def shapes_of(name: str) -> list[str]:
    return [text for n, shape in SHAPES[name].items() for text in ("--shape", f"{n}={shape}")]


def made(new: Command, name: str, *arguments: str) -> tuple[Spec, str]:
    done = new(f"ops.py:{name}", *shapes_of(name), *arguments)
    assert done.status == 0, done.err
    path = Path("specs") / f"{name}.yaml"
    return load(path), path.read_text()


def original(name: str) -> Any:
    found = importlib.util.spec_from_file_location("ops", "ops.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, name)


def results(name: str, inputs: dict[str, torch.Tensor], **sizes: int) -> list[torch.Tensor]:
    result = original(name)(**inputs, **sizes)
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result.values() if isinstance(result, dict) else result)


@pytest.mark.parametrize("name", SHAPES)
def test_a_reference_computes_what_the_function_does(new: Command, name: str) -> None:
    spec, _ = made(new, name, *(["--dtype", "target=int64"] if name == "capped_loss" else []))
    sizes = {dim: SIZES[dim] for dim in spec.dims}
    passed = {"P": SIZES["P"]} if name == "rotated" else {}
    drawn = draw(spec, sizes, seed=1)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in drawn.items()}
    for inputs, text in ((wide, None), (drawn, spec.baseline)):
        expected = results(name, inputs, **passed)
        given = run(spec, inputs, sizes, text)
        assert len(given) == len(expected)
        for output, own in zip(given.values(), expected, strict=True):
            torch.testing.assert_close(output.double(), own.double(), rtol=1e-5, atol=1e-5)
    for declared, own in zip(spec.outputs.values(), results(name, drawn, **passed), strict=True):
        assert [d(sizes) for d in declared.shape] == list(own.shape)
        assert DTYPES[declared.dtype] == own.dtype


def test_what_is_written_reads_like_a_shipped_spec(new: Command) -> None:
    _, text = made(new, "norm_matmul", "--dim", "N=12288", "--out", "specs/norm_matmul.yaml")
    assert (
        text
        == """\
name: norm_matmul
summary: >-
  RMSNorm, then a projection: as Llama has it.
dims: {M: rows of x, K: columns of x, N: rows of w}
inputs:
  x:     {shape: [M, K], dtype: bf16, domain: finite}
  gamma: {shape: [K],    dtype: bf16, init: {uniform: [0.5, 1.5]}, domain: finite}
  w:     {shape: [N, K], dtype: bf16, init: {normal: {std: K**-0.5}}, domain: finite}
constants: {eps: 1.0e-6}
outputs:
  out: {shape: [M, N], dtype: bf16}
reference: |
  # statistics in fp32
  h = x
  h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
  out = h * gamma @ w.T
baseline: |
  input_dtype = x.dtype
  # statistics in fp32
  h = x.to(torch.float32)
  h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
  out = (h * gamma).to(input_dtype) @ w.T
cases:
  - {name: large,  M: 16384, K: 4096, N: 12288}
  - {name: decode, M: 128,   K: 4096, N: 12288, bench: report}
  - {name: ragged, M: 1000,  K: 520,  N: 776, bench: false}
accept: {speedup: 1.0}
"""
    )


def test_a_body_without_casts_keeps_its_words(new: Command) -> None:
    spec, text = made(new, "swiglu")
    assert spec.baseline is None
    assert "  z = (x @ w.mT) * 1.0  # both halves\n" in text and "  act = silu(gate) * up\n" in text
    assert [str(d) for d in spec.outputs["act"].shape] == ["M", "F"]
    assert spec.case("decode").bench == "report" and not spec.case("ragged").bench


def test_numbers_become_constants_dims_or_text(new: Command) -> None:
    spec, text = made(new, "rotated")
    assert spec.static == ("P",) and all(case.sizes["P"] == 32 for case in spec.cases)
    assert "  times = 3\n" in text
    Path("heads.py").write_text(HEADS)
    given = ["--shape", "x=M,K", "--shape", "w=H*W+2*G*W,K", "--shape", "gain=W"]
    assert new("heads.py:split", *given, "--no-input", "--out", "heads.yaml").status == 0
    # H, G and W are static, because they are integer parameters that a shape names.
    assert load(Path("heads.yaml"), check=False).static == ("H", "G", "W")
    assert "0.6931471805599453 * q" in Path("heads.yaml").read_text()
    Path("low.py").write_text(LOW)
    assert new("low.py:low", "--shape=x=M,K", "--shape=w=N,K", "--no-input", "--out=low.yaml").status == 0
    written = Path("low.yaml").read_text()
    assert (
        "z = (x @ w.mT).clamp(min=-30.0) * (-0.5) ** 2" in written and "z.mean(-1, keepdim=True)" in written
    )
    spec, text = made(new, "two")
    assert spec.constants == {"alpha": 0.5} and list(spec.outputs) == ["h", "out1"]
    spec, text = made(new, "capped_loss", "--dtype", "target=int64")
    assert "30.0 * tanh(x @ w.mT / 30.0)" in text and "torch.nn.functional.silu" in text
    assert list(spec.outputs) == ["loss", "x_out"] and "{integers: [0, V]}" in text


def test_answers_come_from_stdin_and_a_bad_one_is_asked_for_again(new: Command) -> None:
    answers = ["", "", "N/2, K", "2*F, K", "float", "", "", "5120", "zero", "13824"]
    done = new("ops.py:swiglu", "--input", "--out", "gated.yaml", answers="\n".join(answers) + "\n")
    assert done.status == 0, done.err
    assert "'N / 2' is no integer polynomial" in done.out and "use one of bf16, fp16, fp32" in done.out
    spec = load("gated.yaml")
    assert spec.name == "gated" and spec.case("large").sizes == {"M": 16384, "K": 5120, "F": 13824}


def test_annotations_give_shapes_and_dtypes(new: Command) -> None:
    Path("typed.py").write_text(
        'def matmul(a: Float[Tensor, "M K"], b: Float16[Tensor, "K N"], c: Float16[Tensor, "M N"]):\n'
        "    return a.to(b.dtype) @ b + c\n"
    )
    done = new("typed.py:matmul", "--no-input", "--dtype", "a=fp16")
    assert done.status == 0, done.err
    spec = load("specs/matmul.yaml")
    assert str(spec.signature().inputs["b"].shape[1]) == "N" and spec.outputs["out"].dtype == "fp16"


def test_what_is_none_by_default_is_left_out_and_helpers_are_written_out(new: Command) -> None:
    _, text = made(new, "mlp")
    assert (
        text[text.index("constants:") :]
        == """\
constants: {eps: 1.0e-6}
outputs:
  out: {shape: [M, F], dtype: bf16}
# bias is left out: it is None by default
# scale is left out: it is None by default
# h.chunk(2, dim=-1) takes contiguous halves. A kernel can split a tile only into its even and odd
# columns (pairs), because one thread's registers hold adjacent columns. Interleave the halves, as
# specs/gemm_swiglu.yaml does: gate, up, gate, up, ... To interleave a tile's columns, interleave
# the rows of its weight. Then write:
#   gate, up = h[..., 0::2], h[..., 1::2]
reference: |
  x = x * 1.0  # nothing to scale by
  h = linear(x, w, None)
  v_1 = h
  h = h * torch.rsqrt((v_1 * v_1).mean(-1, keepdim=True) + eps)
  for _ in range(2):
      v_2 = h * 0.5
      h = h + v_2 * v_2
  gate, up = h.chunk(2, dim=-1)
  out = silu(2.0 * gate) * up
baseline: |
  x = x * 1.0  # nothing to scale by
  h = linear(x, w, None)
  # statistics in fp32
  h = h.float()
  v_1 = h.float()
  h = h * torch.rsqrt((v_1 * v_1).mean(-1, keepdim=True) + eps)
  for _ in range(2):
      v_2 = h * 0.5
      h = h + v_2 * v_2
  gate, up = h.chunk(2, dim=-1)
  out = (silu(2.0 * gate) * up).to(x.dtype)
cases:
  - {name: large,  M: 16384, D: 4096, F: 4096}
  - {name: decode, M: 128,   D: 4096, F: 4096, bench: report}
  - {name: ragged, M: 1000,  D: 520,  F: 776, bench: false}
accept: {speedup: 1.0}
"""
    )


def test_what_was_left_out_is_said_with_how_to_have_it(new: Command) -> None:
    done = new("ops.py:mlp", *shapes_of("mlp"))
    assert (
        "note: ops.py:65: bias is left out: it is None by default; --shape bias=... makes it an input\n"
        in (done.err)
    )
    assert "note: ops.py:81: h.chunk(2, dim=-1) takes contiguous halves." in done.err
    _, text = made(new, "biased")  # `made` passes --shape bias=N, so that bias is an input
    assert "left out" not in text and text.count("out = x @ w.T + bias\n") == 1


def test_a_cast_on_a_line_of_its_own_leaves_none(new: Command) -> None:
    Path("odd.py").write_text(
        "def f(x, w):\n    q, k = x @ w, x\n    # in fp32\n    q, k = q.float(), k.float()\n"
        "    for _ in range(2):\n        q = q.half()\n    h: Tensor = q.to(x.dtype)\n    h = h.type_as(x)\n"
        "    return h + k\n"
    )
    lines = [line.text for line in read("odd.py:f").reference]
    assert lines == ["q, k = x @ w, x", "for _ in range(2):", "    pass", "h = q", "out = h + k"]


CASTS = [  # bodies that need some of their casts
    "z = (x @ w.T).float()\n    return (z * ((z > 0).float() + (z > 1).float())).to(x.dtype)",
    "b = (v / 4).to(v.dtype)\n    return ((x @ w.T).float() * b[:, None]).to(x.dtype)",
    "b = torch.full_like(v, 0.5, dtype=torch.float32)\n    return (x @ w.T).float() * b[:, None]",
    "hot = (v[:, None] == torch.arange(x.shape[1])).float()\n    return (x - hot).to(x.dtype) @ w.T",
]


@pytest.mark.parametrize("body", CASTS)
def test_a_cast_that_the_function_needs_stays(new: Command, body: str) -> None:
    source = f"import torch\ndef f(x, w, v):\n    {body}\n"
    Path("odd.py").write_text(source)
    shapes = [f"--shape={pair}" for pair in ("x=M,K", "w=N,K", "v=M")]
    done = new("odd.py:f", *shapes, "--dtype=v=int64", "--no-input")
    assert done.status == 0, done.err
    spec, scope, sizes = load("specs/f.yaml"), dict[str, Any](), {"M": 24, "K": 16, "N": 8}
    exec(source, scope)
    drawn = draw(spec, sizes, seed=1)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in drawn.items()}
    expected = scope["f"](**wide).double()
    torch.testing.assert_close(run(spec, wide, sizes)["out"], expected, rtol=1e-5, atol=1e-5)


CUTS = {
    "z = x @ w\n    g, u = z.split(8, dim=1)": "g, u = z[:, 0::2], z[:, 1::2]",
    "z = x @ w\n    g, u = torch.split(z, [8, 8], -1)": "g, u = z[..., 0::2], z[..., 1::2]",
    "g, u = (x @ w).tensor_split(2, -1)": "g, u = z[..., 0::2], z[..., 1::2]",
    "z = x @ w\n    n = z.shape[1] // 2\n    g = z[:, :n]\n    u = z[:, n:]": "z[:, 0::2], z[:, 1::2]",
    "a, b = v.chunk(2)\n    g, u = x @ a.T, x @ b.T": "z = x @ v.mT, then z[:, 0::2], z[:, 1::2]",
    "a, b = v[:8], v[8:]\n    g, u = x @ a.T, x @ b.T": "z = x @ v.mT, then z[:, 0::2], z[:, 1::2]",
    "g, u = x @ w, x @ w\n    g = torch.cat((g, u), dim=-1)\n    u = 1": (
        "torch.stack((g, u), -1).flatten(-2)"
    ),
    "z = x @ w\n    g, u = z[:, 0::2], z[:, 1::2]": "",
    "g, u = x.chunk(2)\n    g, u = x @ w, 1": "",
}


@pytest.mark.parametrize("body", CUTS)
def test_halves_that_no_kernel_takes_apart_are_named(new: Command, body: str) -> None:
    lines = f"    import torch\n    {body}\n    return g * u"
    Path("odd.py").write_text(f"def f(x, w, v):\n{lines}\n")
    read_notes = [note.text for note in read("odd.py:f").notes]
    assert len(read_notes) == bool(CUTS[body])
    assert all(note.endswith(CUTS[body]) for note in read_notes)


PARTED = {
    "q, k, v = (x @ w.T).chunk(3, dim=-1)": 3,
    "q, k, v = (x @ w.T).chunk(dim=-1, chunks=3)": 3,
    "z = x @ w.T\n    q, k, v = z.split(z.shape[-1] // 3, dim=-1)": 3,
    "z = x @ w.T\n    n = z.shape[1] // 3\n    q, k, v = torch.split(z, [n, n, n], dim=1)": 3,
    "q, k, v = (x @ w.T).unflatten(-1, (3, -1)).unbind(1)": 3,
    "z = x @ w.T\n    q, k, v = z.view(z.shape[0], 3, -1).unbind(1)": 3,
    "z = x @ w.T\n    n = z.shape[1] // 3\n    q, k, v = z[:, :n], z[:, n : 2 * n], z[:, 2 * n :]": 3,
    "a, b, c = w.chunk(3)\n    q, k, v = x @ a.T, x @ b.T, x @ c.T": 3,
    "z = x @ w.T\n    n = z.shape[1] // 3\n    q, k = z[:, :n], z[:, n:]\n    v = q": 2,
    "z = x @ w.T\n    n = z.shape[1] // 3\n    q, k = z.split([n, 2 * n], -1)\n    v = q": 2,
}


@pytest.mark.parametrize("body", PARTED)
def test_parts_that_are_no_halves_are_named_as_such(new: Command, body: str) -> None:
    Path("odd.py").write_text(f"import torch\ndef f(x, w):\n    {body}\n    return q, k, v\n")
    done = new("odd.py:f", "--shape", "x=M,K", "--shape", "w=3*N,K")
    assert done.status == 0, done.err
    (note,) = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert f"{({2: 'two', 3: 'three'})[PARTED[body]]} contiguous parts" in note
    assert "halves" not in note and "write:" not in note and "column_range" in note
    assert load("specs/f.yaml").static == ("N",)


def test_a_number_of_blocks_is_not_guessed_as_a_width(new: Command) -> None:
    Path("odd.py").write_text("def f(x, w):\n    return x @ w.T\n")
    done = new("odd.py:f", "--shape", "x=M,K", "--shape", "w=128*B,K")
    assert done.status == 0, done.err
    cases = load("specs/f.yaml").cases
    assert [case.sizes["B"] for case in cases] == [32, 32, 13]


@pytest.mark.parametrize("number", [2, 3])
def test_a_width_that_is_cut_is_asked_for_as_that_many_parts(new: Command, number: int) -> None:
    Path("odd.py").write_text(f"def f(x, w):\n    return (x @ w.T).chunk({number}, dim=-1)[0]\n")
    done = new("odd.py:f", "--shape", "x=M,K", "--shape", "w=N,K")
    assert done.status == 2 and f"--shape w={number}*N,K" in done.err
    done = new("odd.py:f", "--shape", "x=M,K", "--shape", f"w={number}*N,K")
    assert done.status == 0, done.err


def test_tiles_of_unlike_widths_are_not_stacked(new: Command) -> None:
    lines = "    q, k = x @ w.T, x @ v.T\n    return torch.cat((q, k), dim=-1)\n"
    Path("odd.py").write_text(f"import torch\ndef f(x, w, v):\n{lines}")
    done = new("odd.py:f", "--shape", "x=M,K", "--shape", "w=2*N,K", "--shape", "v=N,K")
    assert done.status == 0 and "unlike widths" in done.err and "torch.stack" not in done.err
    shapes = ["--shape", "x=M,K", "--shape", "w=N,K", "--shape", "v=N,K"]
    done = new("odd.py:f", *shapes, "--out", "g.yaml")
    assert done.status == 0 and "torch.stack((q, k), -1)" in done.err


ROTATIONS = {  # each function body, and what the note says about cos and sin
    "a, b = z.chunk(2, -1)\n    out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)": (
        "stay as they are"
    ),
    "a, b = z[:, :P], z[:, P:]\n    out = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)": (
        "stay as they are"
    ),
    "a, b = z.chunk(2, -1)\n    r = torch.cat((-b, a), -1)\n    out = z * cos + r * sin": (
        "repeat_interleave(2, -1)"
    ),
    "n = z.shape[-1] // 2\n    r = torch.cat((-z[..., n:], z[..., :n]), -1)\n    out = z * cos + r * sin": (
        "repeat_interleave(2, -1)"
    ),
}


@pytest.mark.parametrize("body", ROTATIONS)
def test_a_rotation_of_halves_says_what_becomes_of_cos_and_sin(new: Command, body: str) -> None:
    """The note proposes code, and says how to interleave the weight, cos and sin. On interleaved inputs, this
    code computes the interleaved result of the function."""
    lines = f"    z = x @ w.T\n    {body}\n    return out\n"
    Path("odd.py").write_text(f"import torch\ndef f(x, w, cos, sin, *, P: int = 8):\n{lines}")
    wide = "2*P" if "repeat" in ROTATIONS[body] else "P"
    shapes = {"x": "M,K", "w": "2*P,K", "cos": f"M,{wide}", "sin": f"M,{wide}"}
    done = new("odd.py:f", *(text for n, s in shapes.items() for text in ("--shape", f"{n}={s}")))
    assert done.status == 0, done.err
    assert "cos and sin" in done.err and ROTATIONS[body] in done.err and "write:" in done.err
    spec, sizes = load("specs/f.yaml"), {"M": 8, "K": 16, "P": 4}
    own = {n: t.double() for n, t in draw(spec, sizes, seed=1).items()}
    half = torch.arange(8).view(2, 4).mT.flatten()  # 0, 4, 1, 5, 2, 6, 3, 7
    moved = own | {"w": own["w"][half]}
    if wide == "2*P":
        own |= {n: own[n][:, :4].repeat(1, 2) for n in ("cos", "sin")}
        moved |= {n: own[n][:, :4].repeat_interleave(2, -1) for n in ("cos", "sin")}
    (expected,) = run(spec, own, sizes).values()
    (given,) = run(spec, moved, sizes, adjacent(done.err, spec.reference)).values()
    torch.testing.assert_close(given, expected[:, half])


def adjacent(said: str, reference: str) -> str:
    """Return the reference with the changes that the notes propose. The code after "write:" in a note
    replaces the code that the note names."""
    for line in said.splitlines():
        if line.startswith("note: ") and " write: " in line:
            words, code = line.split(" write: ")
            named = words.split(": ", 2)[2].partition(" rotates ")[0].partition(" takes ")[0]
            if " with " in named:
                for old, made in zip(named.split(" with "), code.split("], "), strict=True):
                    reference = reference.replace(old, made if made.endswith("]") else f"{made}]")
            else:
                reference = reference.replace(named, code.partition(" = ")[2] or code)
    return reference


def test_a_file_is_never_imported(new: Command) -> None:
    Path("ops.py").write_text("open('imported', 'w').close()\n" + OPS)
    made(new, "swiglu")
    assert Path("specs/swiglu.yaml").exists() and not Path("imported").exists()


BODIES = {
    "a branch": ("    y = x @ w\n    if y.sum() > 0:\n        y = -y\n    return y", 3, "no branches"),
    "an early return": ("    for i in range(2):\n        return x @ w\n    return x", 3, "returns once"),
    "a loop": ("    while True:\n        x = x @ w\n    return x", 2, "no while"),
    "a context": ("    with torch.no_grad():\n        return x @ w", 2, "leave it out"),
    "a call": ("    y = x @ w\n    print(y)\n    return y", 3, "no side effects"),
    "a function": ("    def g(a):\n        return a\n    return g(x @ w)", 2, "write its body out"),
    "no return": ("    y = x @ w", 2, "return a tensor, a tuple or a dict"),
    "an unknown name": ("    # why\n    h = x @ w\n    return helper(h)", 4, "'helper' is not defined"),
    "another library": ("    import numpy as np\n    return np.matmul(x, w)", 3, "only torch's names"),
    "an imported helper": ("    from ops import two\n    return two(x, w)", 3, "write here what it computes"),
    "wrong shapes": ("    h = x\n    return h @ w.mT", 3, "cannot be multiplied"),
    "changed inputs": ("    x *= 2\n    return x @ w", 1, "writes to its input 'x'"),
    "a copy no more": (
        "    h = x.float()\n    h += 1\n    return h.type_as(x) @ w",
        1,
        "writes to its input 'x'",
    ),
    "two axes too many": ("    return (x @ w)[None]", 1, "output out has 3 axes"),
    "no tensor": ("    return (x @ w).shape", 1, "output out is Size"),
    "a scalar": ("    return (x @ w).mean()", 1, "output out is a scalar"),
    "nothing": ("    return ()", 2, "returns no tensor"),
    "integers": ("    return (x @ w).argmax(-1)", 1, "is torch.int64"),
    "unnamed outputs": ("    return {0: x @ w}", 2, "output 0 has no valid name"),
}


@pytest.mark.parametrize("why", BODIES)
def test_a_body_that_is_no_reference_is_refused_with_its_line(new: Command, why: str) -> None:
    body, line, words = BODIES[why]
    refused(new, f"def f(x, w):\n{body}\n", f"odd.py:{line}: ", words)


@pytest.mark.parametrize(
    ("source", "place", "words"),
    [
        ("\nf = lambda x, w: x @ w\n", "odd.py:2: ", "f is not a plain function (lambda); write def f(...)"),
        ("class f:\n    pass\n", "odd.py:1: ", "write def f(...)"),
        ("def ff(x):\n    return x\n", "odd.py: ", "no top-level function 'f'; did you mean ff?"),
        ("\ndef f(x, w)\n    return x\n", "odd.py:2: ", "expected ':'"),
        ("def f(*args):\n    return args[0]\n", "odd.py:1: ", "*args takes any number of inputs"),
        (
            "def f(x, w, mode='fast'):\n    return x\n",
            "odd.py:1: ",
            "mode='fast' is neither a tensor nor a number",
        ),
        (
            "def f(x, w, n=None):\n    if n is None:\n        n = 2\n    if n:\n        x = w\n    return x",
            "odd.py:4: ",
            "no branches",
        ),
        (
            "def g(a):\n    b = a * 2\n    return b\n\n\ndef f(x, w):\n    return g(x @ w)\n",
            "odd.py:7: ",
            "g is defined on line 1, but it is not a helper of one return expression",
        ),
        (
            "def silu(a):\n    a = a * 2\n    return a\n\n\ndef f(x, w):\n    return silu(x @ w)\n",
            "odd.py:7: ",  # the file defines its own silu, which hides torch's
            "silu is defined on line 1",
        ),
        (
            "def g(a):\n    return g(a) + 1\n\n\ndef f(x, w):\n    return g(x @ w)\n",
            "odd.py:2: ",
            "helper g calls itself",
        ),
        (
            "def g(a):\n    return a * c\n\n\ndef f(x, w):\n    c = x @ w\n    return g(c)\n",
            "odd.py:7: ",
            "helper g reads the file's c, but the function has its own c; rename one of them",
        ),
        (
            "def g(a, b):\n    return a * b\n\n\ndef f(x, w):\n    return g(x @ w)\n",
            "odd.py:6: ",
            "g(x @ w) does not fit the parameters of g",
        ),
        ("def f(x, w, eps: float):\n    return x\n", "odd.py:1: ", "eps has no value; give it a default"),
        (
            "def f(x, w, n: int):\n    return x @ w\n",
            "odd.py:1: ",
            "name it in a shape, or give it a default",
        ),
        ("def f(x, W):\n    return x @ W\n", "odd.py:1: ", "'W' is not a valid name for a value"),
        ("@cached\ndef f(x, w):\n    return x @ w\n", "odd.py:1: ", "@cached may change"),
    ],
)
def test_what_is_no_plain_function_is_refused(new: Command, source: str, place: str, words: str) -> None:
    refused(new, source, place, words)


def refused(new: Command, source: str, place: str, words: str) -> None:
    Path("odd.py").write_text(source)
    done = new("odd.py:f", "--shape", "x=M,K", "--shape", "w=K,N")
    assert done.status == 2 and done.err.startswith(f"coda-agent: {place}"), done.err
    assert words in done.err and not Path("specs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ops.py:swiglu"], "ops.py:23: no shape for x, w; give --shape x=... --shape w=..."),
        (["ops.py:swiglu", "--shape", "x=M,D", "--input"], "no answer to 'x: dtype'; use --dtype x=..."),
        (
            ["ops.py:swiglu", "--shape", "z=M,D"],
            "--shape z: 'z' is unknown; use one of x, w, preact, act",
        ),
        (["ops.py:swiglu", *shapes_of("swiglu"), "--dim", "N=8"], "--dim N: 'N' is unknown"),
        (["ops.py:swiglu", *shapes_of("swiglu"), "--dim", "M=0"], "--dim M=0: '0' is not a size"),
        (
            ["ops.py:swiglu", *shapes_of("swiglu"), "--dtype", "x=bf8"],
            "--dtype x=bf8: 'bf8' is not valid here",
        ),
        (["ops.py:swiglu", *shapes_of("swiglu"), "--init", "w={norm: 1}"], "unknown key 'norm'"),
        (["ops.py:swiglu", "--shape", "x"], "--shape x: write --shape NAME=VALUE"),
        (["ops.py:swiglu", "--shape", "x=3,4", "--shape", "w=6,4"], "no shape names a dim"),
        (["ops.py:swiglu", *shapes_of("swiglu"), "--out", "Swiglu.yaml"], "'Swiglu' is not a valid spec"),
        (["ops.py"], "'ops.py' names no function; write path/to/file.py:function"),
        (["none.py:f"], "none.py: no such file"),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(new: Command, arguments: list[str], words: str) -> None:
    done = new(*arguments)
    assert done.status == 2 and words in done.err, done.err
    assert not list(Path().rglob("*.yaml"))


def test_an_output_may_be_fp8(new: Command) -> None:
    Path("eight.py").write_text("def f(x, w, scale):\n    return {'out': (x @ w.mT) * scale}\n")
    given = ["--shape", "x=M,K", "--shape", "w=N,K", "--shape", "scale=", "--dtype", "scale=fp32"]
    assert new("eight.py:f", *given, "--dtype", "out=fp8_e5m2", "--out", "f.yaml").status == 0
    assert load(Path("f.yaml"), check=False).outputs["out"].dtype == "fp8_e5m2"
    cast = "import torch\ndef f(x, w, scale):\n    return ((x @ w.mT) * scale).to(torch.float8_e4m3fn)\n"
    Path("eight.py").write_text(cast)
    assert new("eight.py:f", *given, "--out", "g.yaml").status == 0
    spec = load(Path("g.yaml"), check=False)
    assert spec.outputs["out"].dtype == "fp8_e4m3" and "float8" not in spec.reference


def test_a_file_that_exists_stays(new: Command) -> None:
    Path("mine.yaml").write_text("mine")
    done = new("ops.py:swiglu", *shapes_of("swiglu"), "--out", "mine.yaml")
    assert done.status == 2 and "choose another path with --out" in done.err
    assert Path("mine.yaml").read_text() == "mine"


def test_an_output_of_no_known_shape_is_asked_for(new: Command) -> None:
    Path("odd.py").write_text("def f(x, w):\n    return (x @ w)[:, 1::3]\n")
    shapes = ["--shape", "x=M,K", "--shape", "w=K,N"]
    done = new("odd.py:f", *shapes)
    assert done.status == 2 and "name its dims with --shape out=..." in done.err
    done = new("odd.py:f", *shapes, "--shape", "out=M,N")
    assert done.status == 2 and "output 'out' has shape" in done.err and not Path("specs").exists()


# functions in benchmarks/operators.py, which have no spec in specs/


@pytest.mark.parametrize("name", OPTIONS)
def test_a_function_gives_the_spec_that_was_authored(new: Command, name: str) -> None:
    done = new(
        f"{ROOT}/benchmarks/operators.py:{name}",
        "--no-input",
        "--out",
        f"{name}.yaml",
        *OPTIONS[name].split(),
    )
    assert done.status == 0, done.err
    header, _ = read_export(RECORDINGS / f"{name}.jsonl")
    assert load(Path(f"{name}.yaml"), check=False).hash == header["spec_hash"]


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("math.log(2.0)", math.log(2.0)),
        ("math.prod((2, 3), start=4)", 24),
        ("math.factorial(200)", None),
        ("math.log(0.0)", None),
        ("math.log(x)", None),
    ],
)
def test_calls_of_math_are_numbers_where_they_have_one(call: str, value: float | None) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert _math_value(call.partition("(")[0], node) == value
