"""A prompt contains the whole vocabulary, but no kernel, example or tip of the prompt's own spec."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
from authoring import ACCEPTED, HONEST, RECORDINGS, SHIPPED, SPECS, kernel_of, write_toy
from checkout import ROOT

from coda_agent import primitives
from coda_agent.agent.prompts import prompt
from coda_agent.agent.prompts.prompt import BUDGET, EXAMPLES, Prompt, assemble, tokens
from coda_agent.agent.run.loop import extract
from coda_agent.agent.storage.journal import read_export
from coda_agent.agent.tips import PROPOSED, RETIRED, Tip
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Rejected
from coda_agent.verifier.verify import check

PRODUCT = re.compile(r"\w+ = gemm\(\w+, \w+(\.mT)?\)")
OTHERS = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def prompt_of(name: str, tips: list[Tip] | None = None) -> Prompt:
    path = SPECS / f"{name}.yaml"
    return assemble(load(path, check=False), path.read_text(encoding="utf-8"), tips)


def tip(number: int, spec: str) -> Tip:
    return Tip(f"tip-{number}", f"Lesson {number} of {spec}", spec, "trace/call", "as said", "1")


def statements(source: str) -> set[str]:
    """Return the lines that reveal a kernel: lines with a call, an operator or a comparison, and with more
    than 12 characters, not counting spaces. A line that only multiplies two inputs does not count, because
    the spec states this product anyway."""
    lines = source.splitlines()
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call | ast.BinOp | ast.Compare) and not isinstance(node, ast.FunctionDef):
            found.add(lines[node.lineno - 1].strip())
    return {line for line in found if len(line.replace(" ", "")) > 12 and not PRODUCT.fullmatch(line)}


# a prompt contains nothing of its own spec's kernels


def own_sources(name: str) -> list[str]:
    """Return every kernel of this spec in the project: accepted, recorded, or written for these tests."""
    recording = RECORDINGS / f"{name}.jsonl"
    events = read_export(recording)[1] if recording.exists() else []
    return [
        kernel_of(name),
        *([HONEST[name]] if name in HONEST else []),
        *(source for e in events if e.kind == "answer" for source in code(e.payload["text"])),
    ]


def code(answer: str) -> list[str]:
    source = extract(answer)
    return [source] if source else []


@pytest.mark.parametrize("name", SHIPPED)
def test_no_line_of_an_answer_is_in_the_prompt(name: str) -> None:
    spec = (SPECS / f"{name}.yaml").read_text(encoding="utf-8").strip()
    whole = str(prompt_of(name))
    assert whole.count(spec) == 1
    rest = whole.replace(spec, "")  # the spec's reference may contain lines of a kernel
    sources = own_sources(name)
    assert sources
    for source in sources:
        telling = statements(source)
        assert telling  # otherwise the next line compares nothing
        assert not [line for line in telling if line in rest]


@pytest.mark.parametrize("name", ACCEPTED)
def test_no_line_of_a_recorded_answer_was_in_the_prompt_it_answered(name: str) -> None:
    spec = (SPECS / f"{name}.yaml").read_text(encoding="utf-8").strip()
    reference = spec[spec.index("reference:") :]
    _, events = read_export(RECORDINGS / f"{name}.jsonl")
    given = str(next(e.payload for e in events if e.kind == "prompt"))
    telling = {
        line for e in events if e.kind == "answer" for s in code(e.payload["text"]) for line in statements(s)
    }
    assert telling
    assert not [line for line in telling if line in given and line not in reference]


def test_an_answer_in_the_prompt_would_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If an example contained a kernel for the prompt's own spec, the comparison in
    ``test_no_line_of_an_answer_is_in_the_prompt`` would fail."""
    (tmp_path / "leak.yaml").write_text("inputs:\n  x: {shape: [M, K]}\ncases: []\n")
    (tmp_path / "leak.py").write_text(HONEST["gemm_swiglu_bwd"])
    monkeypatch.setattr(prompt, "EXAMPLES", tmp_path)
    text = str(prompt_of("gemm_swiglu_bwd"))
    assert statements(HONEST["gemm_swiglu_bwd"]) <= set(map(str.strip, text.splitlines()))


def test_examples_are_other_operators() -> None:
    assert len(OTHERS) >= 2 and not set(OTHERS) & set(SHIPPED)


@pytest.mark.parametrize("name", OTHERS)
def test_an_example_is_left_out_of_its_own_prompt(name: str) -> None:
    path = EXAMPLES / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    own = assemble(load(path, check=False), text)
    source = path.with_suffix(".py").read_text(encoding="utf-8")
    reference = text[text.index("reference:") : text.index("cases:")].strip()
    assert source.strip() not in str(own) and reference not in own.system
    usual = prompt_of(SHIPPED[0]).system
    assert source.strip() in usual and reference in usual
    assert all(f"def {other}(" in own.system for other in OTHERS if other != name)


def test_tips_learned_on_the_spec_are_left_out() -> None:
    tips = [tip(1, "gemm_swiglu_bwd"), tip(2, "gemm_chain"), tip(3, "gemm_swiglu_bwd")]
    own, other = prompt_of("gemm_swiglu_bwd", tips), prompt_of("gemm_rmsnorm_swiglu", tips)
    assert "- Lesson 2 of gemm_chain" in own.system
    assert "Lesson 1" not in str(own) and "Lesson 3" not in str(own)
    assert all(f"- Lesson {n} " in other.system for n in (1, 2, 3))


def test_a_tip_learned_on_several_specs_is_left_out_of_each() -> None:
    tips = [tip(1, "gemm_chain, gemm_swiglu_bwd"), tip(2, "gemm_swiglu_bwd_too")]
    own, other = prompt_of("gemm_swiglu_bwd", tips), prompt_of("gemm_rmsnorm_swiglu", tips)
    assert "Lesson 1" not in own.system and "Lesson 2" in own.system
    assert "Lesson 1" in other.system and "Lesson 2" in other.system


@pytest.mark.parametrize("state", [PROPOSED, RETIRED])
def test_prompts_read_accepted_tips_only(state: str) -> None:
    tips = [replace(tip(1, "other"), state=state), tip(2, "other")]
    assert "Lesson 1" not in str(prompt_of(SHIPPED[0], tips))
    assert "Lesson 2" in prompt_of(SHIPPED[0], tips).system


def test_without_tips_there_is_no_heading_for_them() -> None:
    assert "Tips" not in prompt_of(SHIPPED[0], []).system
    assert "Tips" not in prompt_of("gemm_swiglu_bwd", [tip(1, "gemm_swiglu_bwd")]).system
    assert "Tips" in prompt_of("gemm_swiglu_bwd", [tip(1, "other")]).system


# a prefix that a provider can cache


def test_the_prefix_is_one_for_all_specs() -> None:
    tips = [tip(1, "gemm_chain")]
    prompts = [prompt_of(name, tips) for name in SHIPPED]
    assert len({prompt.system for prompt in prompts}) == 1
    assert len({prompt.task for prompt in prompts}) == len(SHIPPED)
    assert prompt_of(SHIPPED[0], tips) == prompts[0]


def test_the_prefix_names_no_spec() -> None:
    system = prompt_of(SHIPPED[0], []).system
    assert not [name for name in SHIPPED if name in system]


def test_the_size() -> None:
    for name in SHIPPED:
        assert tokens(str(prompt_of(name))) < BUDGET == 25_000
    assert len(assemble(load(SPECS / f"{SHIPPED[0]}.yaml", check=False), "", []).system) <= 12_000


def many_tips(length: int, **fields: str) -> list[Tip]:
    return [replace(tip(n, "other"), lesson=f"Lesson {n} {'x' * length}", **fields) for n in range(1, 2001)]


def lessons(system: str) -> list[int]:
    return [int(number) for number in re.findall(r"^- Lesson (\d+) ", system, re.MULTILINE)]


@pytest.mark.parametrize("length", [30, 150])
def test_tips_that_helped_least_leave_where_the_budget_ends(length: int) -> None:
    helpful = replace(tip(0, "other"), measured="helps: 9/9 with, 0/9 without, difference +1.00 [+0.6, +1.0]")
    known = [helpful, *many_tips(length)]
    prompts = [prompt_of(name, known) for name in SHIPPED]
    systems = {prompt.system for prompt in prompts}
    assert len(systems) == 1  # all prompts drop the same tips
    (system,) = systems
    shown = lessons(system)
    assert shown == [0, *range(2001 - len(shown) + 1, 2001)]  # the oldest unmeasured tips are dropped
    sizes = [tokens(str(prompt)) for prompt in prompts]
    assert BUDGET - 3_000 < max(sizes) <= BUDGET


def test_own_tips_take_no_others_place() -> None:
    own, other = SHIPPED[:2]
    known = [replace(t, spec=own) if t.number % 2 else t for t in many_tips(150)]
    shown = lessons(prompt_of(own, known).system)
    assert shown == [n for n in lessons(prompt_of(other, known).system) if n % 2 == 0] and shown


def test_a_long_spec_has_fewer_tips_and_stays_within_the_budget(tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    text = path.read_text() + "# more\n" * 3000
    long = assemble(load(path, check=False), text, many_tips(150))
    short = assemble(load(path, check=False), path.read_text(), many_tips(150))
    assert BUDGET - 100 < tokens(str(long)) <= BUDGET
    assert set(lessons(long.system)) < set(lessons(short.system)) and lessons(long.system)


# the prompt contains the whole vocabulary


@pytest.mark.parametrize("name", [n for n in primitives.__all__ if n != "kernel"])
def test_every_primitive_has_a_paragraph_and_a_page(name: str) -> None:
    system, primitive = prompt_of(SHIPPED[0], []).system, getattr(primitives, name)
    call = f"{name}({', '.join(inspect.signature(primitive).parameters)})"
    (paragraph,) = re.findall(rf"^- `{re.escape(call)}`: (.+(?:\n  .+)*)", system, re.MULTILINE)
    page = inspect.getdoc(primitive) or ""
    words = " ".join(page.replace("``", "`").split())
    paragraph = " ".join(paragraph.split())
    assert paragraph[:15] == words[:15] and "Cost: " in paragraph
    assert prompt.read(name) == f"### {call}\n\n{page}"


def test_the_rules_name_what_a_file_may_hold() -> None:
    system = prompt_of(SHIPPED[0], []).system
    assert all(word in system for word in ("`@kernel`", "from primitives import", ".mT", ".rows", ".columns"))
    assert str(ROOT) not in system and "verifier/" not in system


def test_the_task_is_the_spec_and_how_to_answer(tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    task = assemble(load(path, check=False), path.read_text(), []).task
    assert f"```yaml\n{path.read_text().strip()}\n```" in task
    assert "`def toy(a, b, v)`, returning a dict of c." in task and "one ```python block" in task


def test_constants_are_parameters() -> None:
    assert (
        "def gemm_residual_partial_rmsnorm(y, w, x, gamma, eps)`"
        in prompt_of("gemm_residual_partial_rmsnorm").task
    )


def test_feedback_without_a_line() -> None:
    words = prompt.feedback(Rejected(gate="trace", code="timeout", message="took over 5 s"))
    assert words.startswith("Rejected at gate `trace`, reason `timeout`:\n\ntook over 5 s\n")
    assert "Gates passed before: none." in words and "line None" not in words


# every example passes the gates


@pytest.mark.parametrize("name", OTHERS)
def test_an_example_passes_the_gates(name: str, no_compiler: None) -> None:
    path = EXAMPLES / f"{name}.yaml"
    report, program = check(load(path), path.with_suffix(".py").read_text(encoding="utf-8"))
    assert report.status == "checked" and program is not None, report
    assert [gate.gate for gate in report.gates] == ["trace", "contract", "interpret", "compile"]
    worst = report.gates[2].figures["worst_rms_ratio"]
    assert worst.keys() == program.outputs.keys() and all(ratio < 1.1 for ratio in worst.values())
