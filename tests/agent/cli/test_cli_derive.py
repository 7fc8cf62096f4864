"""The command ``derive`` writes a program and a spec that loads, and counts matmuls correctly. Bad input gets
a one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import ROOT
from commanding import Command

from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.verifier.loading import load

pytestmark = pytest.mark.usefixtures("runs_home", "plain", "nothing_beside")
KERNELS = ROOT / "generated_kernels"


def kernel(name: str) -> Path:
    return KERNELS / f"{name}.program.json"


@pytest.mark.parametrize(
    ("name", "more", "products", "head"),
    [
        ("gemm_swiglu", (), 2, True),
        ("gemm_swiglu", ("--of", "act", "--behind", "act"), 3, False),
        ("gemm_swiglu_mlp", ("--of", "out"), 4, False),
        ("gemm_residual_rmsnorm_gemm", ("--of", "h,z"), 4, True),
        ("gemm_partial_cross_entropy_unstored", (), 3, False),
        ("gemm_rope", (), 2, True),
        ("gemm_qk_norm_rope", ("--wrt", "x,w", "--of", "q"), 2, True),
    ],
)
def test_its_files_are_a_program_and_a_spec_that_loads(
    command: Command, tmp_path: Path, name: str, more: tuple[str, ...], products: int, head: bool
) -> None:
    done = command("derive", kernel(name), *more, "--out", tmp_path)
    assert done.status == 0 and done.err == "", done
    spec = load(tmp_path / f"{name}_backward.yaml")
    text = (tmp_path / f"{name}_backward.program.json").read_text()
    program = Program.from_json(text)
    assert program.signature.inputs == spec.signature().inputs
    assert program.signature.outputs == spec.signature().outputs
    assert len(cut(program).gemms) == products
    assert done.out.count("step ") == products and f"in {products} matmuls" in done.out
    assert (tmp_path / f"{name}_backward_head.program.json").exists() is head
    assert ("without a matmul" in done.out) is head


def test_an_edited_spec_is_not_overwritten(command: Command, tmp_path: Path) -> None:
    for edit in ("", "# mine\n"):
        spec = tmp_path / "gemm_rope_backward.yaml"
        assert (
            command("derive", kernel("gemm_rope"), "--out", tmp_path).status == 0
        )  # unchanged files are fine
        with spec.open("a") as file:
            file.write(edit)
    done = command("derive", kernel("gemm_rope"), "--wrt", "x", "--out", tmp_path)
    assert done.status == 2 and "gemm_rope_backward." in done.err and "other content" in done.err
    assert spec.read_text().endswith("# mine\n")


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("gemm_grad_accumulate", (), "'dw_new' overwrites input 'dw'"),
        ("gemm_fp8_row_scale", (), "input 'x' is fp8"),
        ("gemm_rope_positions", ("--wrt", "positions"), "'positions' holds integers"),
        ("gemm_rmsnorm", ("--wrt", "q"), "no input 'q'; it has x, w, rstd"),
        ("gemm_row_abs_max", ("--of", "amax"), "no differentiable path"),
        ("gemm_partial_cross_entropy", ("--save-bytes", "1"), "at most 1 bytes a row"),
        ("gemm_swiglu", ("--accumulate", "y"), "the gradient of 'y' is not requested"),
        ("gemm_swiglu", ("--save", "y"), "no output or node 'y'"),
        ("gemm_swiglu", ("--behind", "down"), "no output 'down'; it has preact, act"),
        ("gemm_swiglu", ("--out", "nowhere"), "no such folder"),
        ("gemm_qk_norm_rope", (), "'rstd' is head statistic [M, H], whose gradient no kernel reads"),
        ("gemm_qk_norm_rope", ("--of", "rstd"), "leave it out, with --of q"),
    ],
)
def test_bad_input_has_one_line(
    command: Command, tmp_path: Path, name: str, more: tuple[str, ...], said: str
) -> None:
    done = command("derive", kernel(name), "--out", tmp_path, *more)
    assert done.status == 2 and done.out == "" and "Traceback" not in done.err
    (line,) = [each for each in done.err.splitlines() if each.startswith("Error")]
    assert said in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_spec_with_its_kernel_is_derived_and_judged(command: Command, tmp_path: Path) -> None:
    done = command("derive", ROOT / "specs" / "gemm_row_abs_max.yaml", "--check", "--out", tmp_path)
    assert done.status == 0 and done.out.splitlines()[-1].startswith("right: ")
    lone = tmp_path / "lone.yaml"
    lone.write_text("name: lone\n")
    refused = command("derive", lone)
    assert refused.status == 2 and "lone.program.json" in refused.err and "Traceback" not in refused.err


@pytest.mark.slow
def test_packed_queries_keys_and_values_are_judged(command: Command, tmp_path: Path) -> None:
    """The backward reads one matrix, in which the gradients of q, k and v lie side by side. So the
    backward needs no third matmul for ``sum(dz * z)``, the row sum in the gradient of ``rstd``."""
    name = "gemm_rmsnorm_qkv_rope"
    (path,) = (ROOT / "tests" / "honest" / name).glob("*.py")
    spec = ROOT / "specs" / f"{name}.yaml"
    done = command("derive", path, "--spec", spec, "--of", "q,k,v", "--check", "--out", tmp_path)
    assert done.status == 0 and done.out.splitlines()[-1].startswith("right: "), done
    assert "in 2 matmuls" in done.out
    assert "d_q_k_v" in load(tmp_path / f"{name}_backward.yaml").drawn


def test_a_backward_that_loses_its_values_is_refused(command: Command, tmp_path: Path) -> None:
    done = command("derive", kernel("gemm_residual_rmsnorm_gemm_bwd"), "--check", "--out", tmp_path)
    assert done.status == 1 and done.out.splitlines()[-1].startswith("refused: numerics: ")
