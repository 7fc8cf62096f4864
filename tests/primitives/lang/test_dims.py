"""Symbolic sizes: parsing, evaluation, and the texts that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_agent.primitives.lang.dims import MAX_SIZE, Dim, Unsolvable, solve, solving_order

SIZES = {"M": 7, "F": 11, "H_2": 13}


@pytest.mark.parametrize(
    ("text", "value", "canonical"),
    [
        ("M", 7, "M"),
        ("2*F", 22, "2*F"),
        ("F*2", 22, "2*F"),
        ("F + F", 22, "2*F"),
        ("H_2*M + 1", 92, "1 + H_2*M"),
        ("(M + 1)*(M - 1)", 48, "-1 + M*M"),
        ("-(M - F)", 4, "F + -1*M"),
        ("M - M", 0, "0"),
        ("0", 0, "0"),
        ("128", 128, "128"),
        (128, 128, "128"),
        (" 3 * M ".strip(), 21, "3*M"),
    ],
)
def test_parses_evaluates_and_prints(text: str | int, value: int, canonical: str) -> None:
    dim = Dim.parse(text)
    assert dim(SIZES) == value
    assert str(dim) == canonical
    assert Dim.parse(canonical) == dim and hash(Dim.parse(canonical)) == hash(dim)


@pytest.mark.parametrize(
    "text",
    [
        "M/2", "M//2", "M%2", "M**2", "~M", "M if F else 2", "M and F", "M < F", "f(M)", "M.x", "M[0]", "[M]",
        "(M, F)", "lambda: 1", "__import__('os').system('true')", "M; F", "M = 2", "(M := 2)", "1.5", "1j",
        "'M'", "True", "None", "...", "", " ", "\0", "M\0", "\u00e9", "_M", "M" * 33, "M +",
        "(" * 40, "M+" * 40 + "M", "9" * 81, None, True, 1.5, b"M", ["M"], MAX_SIZE, -MAX_SIZE,
        pytest.param(10**5000, id="huge"),
    ],
)  # fmt: skip
def test_refuses_what_is_no_integer_polynomial(text: object) -> None:
    with pytest.raises(ValueError, match=r"no size|no integer polynomial|null bytes"):
        Dim.parse(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["(A+B+C+D+E)*(F+G+H+I+J)", "*".join("M" * 20), "(A+B+1)*" * 7 + "(A+B+1)"])
def test_refuses_to_grow(text: str) -> None:
    with pytest.raises(ValueError, match="more than 16"):
        Dim.parse(text)


def test_a_dim_without_a_size_is_named() -> None:
    with pytest.raises(KeyError, match="F"):
        Dim.parse("2*F")({"M": 1})


def test_names_are_what_remains() -> None:
    assert Dim.parse("2*F + M*H - M*H").names == {"F"}
    assert Dim.parse(3).names == frozenset()


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [
        ("2*F", "F", (2, 1)),
        ("F", "2*F", (1, 2)),
        ("2*F + 4*M", "3*F + 6*M", (2, 3)),
        ("256", "128", (2, 1)),
        ("F*M", "M*F", (1, 1)),
        ("F", "M", None),
        ("F + 1", "F", None),
        ("F + M", "F + 2*M", None),
        ("F*F", "F", None),
        ("0", "F", None),
        ("F", "0", None),
    ],
)
def test_ratio(a: str, b: str, ratio: tuple[int, int] | None) -> None:
    assert Dim.parse(a).ratio(Dim.parse(b)) == ratio


def test_sizes_that_happen_to_be_equal_have_no_ratio() -> None:
    assert Dim.parse("M").ratio(Dim.parse("F")) is None  # M and F may differ in another call


@pytest.mark.parametrize("text", ["(AA+BB)*(CC+DD)*(EE+FF)", "9" * 30, "3037000500*3037000500*F"])
def test_what_could_not_be_read_back_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too long a size"):
        Dim.parse(text)


def test_halved() -> None:
    assert Dim.parse("2*F + 4").divided(Dim.parse(2)) == Dim.parse("F + 2")
    with pytest.raises(ValueError, match="2\\*F \\+ M is not divisible by 2"):
        Dim.parse("2*F + M").divided(Dim.parse(2))


TERMS = st.lists(
    st.tuples(st.integers(-9, 9), st.lists(st.sampled_from(sorted(SIZES)), max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(TERMS)
def test_agrees_with_python(terms: list[tuple[int, list[str]]]) -> None:
    text = " + ".join("*".join([f"({c})", *names]) for c, names in terms)
    dim = Dim.parse(text)
    assert dim(SIZES) == eval(text, {}, SIZES)  # eval is safe here, because this test wrote the text
    assert Dim.parse(str(dim)) == dim
    doubled = dim + dim
    assert doubled.ratio(dim) == ((2, 1) if dim.terms else None)
    assert doubled.divided(Dim.parse(2)) == dim


@pytest.mark.parametrize(
    ("a", "b", "quotient"),
    [
        ("2*H*P", "2*P", "H"),
        ("2*H*P", "H*P", "2"),
        ("6*P + 4*H*P", "2*P", "3 + 2*H"),
        ("P*P*H", "P", "P*H"),
        ("128", "64", "2"),
        ("2*P", "1", "2*P"),
        ("M - M", "P", "0"),
    ],
)
def test_divided(a: str, b: str, quotient: str) -> None:
    assert Dim.parse(a).divided(Dim.parse(b)) == Dim.parse(quotient)


@pytest.mark.parametrize(
    ("a", "b"),
    [("N", "P"), ("2*P", "4*P"), ("3*P", "2*P"), ("2*P", "P*P"), ("2*P + 1", "2*P"), ("4*P", "2*P + P*P"),
     ("2*P", "-2*P"), ("2*P", "0"), ("2*P", "P - P"), ("64", "128")],
)  # fmt: skip
def test_what_is_no_whole_number_of_times_is_refused(a: str, b: str) -> None:
    with pytest.raises(ValueError, match="is not divisible by"):
        Dim.parse(a).divided(Dim.parse(b))


@pytest.mark.parametrize(("formula", "extent"), [("M", 0), ("2*M", 3), ("M + 2", 2), ("M + 2", 1)])
def test_a_dim_is_solved_for_a_positive_integer_or_refused(formula: str, extent: int) -> None:
    shapes = {"x": [Dim.parse(formula)]}
    with pytest.raises(ValueError, match="no positive M makes"):
        solve(shapes, ["M"], {"x": [extent]})


def test_a_square_determines_no_dim() -> None:
    with pytest.raises(Unsolvable, match="dim 'M' follows from no shape"):
        solving_order({"x": [Dim.parse("M*M")]}, ["M"])
