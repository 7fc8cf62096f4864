"""Hostile programs: graphs and operations that no tracer writes."""

from __future__ import annotations

from cheats.corpus import rejected, wrong
from cheats.tamper import Json, Recorder, add, node, refused
from cheats.twins import CHAIN, CROSS_ENTROPY, QK_NORM

cheat = Recorder()


# The graph


@cheat(refused("graph", "only earlier nodes"))
def a_node_that_reads_itself(program: Json) -> None:
    """A cycle of one."""
    node(program, "add")[1][0] = program["nodes"].index(node(program, "add"))


@cheat(refused("graph", "only earlier nodes"))
def a_node_that_reads_a_later_one(program: Json) -> None:
    """A cycle of two."""
    node(program, "add")[1][0] = program["nodes"].index(node(program, "multiply"))


@cheat(refused("graph", "only earlier nodes"))
def a_dangling_node(program: Json) -> None:
    """Reads where nothing is."""
    node(program, "add")[1][0] = 1 << 40


@cheat(refused("graph", "only earlier nodes"))
def a_node_counted_from_the_end(program: Json) -> None:
    """Python's lists have a last element at -1."""
    node(program, "add")[1][0] = -1


@cheat(refused("graph", "no output depends on"))
def a_dead_gemm(program: Json) -> None:
    """A step that nothing asked for."""
    program["nodes"].append(node(program, "gemm"))


@cheat(refused("graph", "which is not there"))
def an_output_that_is_not_there(program: Json) -> None:
    """Names a node past the last."""
    program["outputs"]["h"] = 512


@cheat(refused("graph", "which is not there"))
def an_output_counted_from_the_end(program: Json) -> None:
    """Names node -1."""
    program["outputs"]["h"] = -1


@cheat(refused("size", "at most 512 nodes"))
def too_many_nodes(program: Json) -> None:
    """A sum of six hundred."""
    for _ in range(600):
        program["outputs"]["h"] = add(program, "add", [program["outputs"]["h"], program["outputs"]["h"]])


@cheat(rejected("contract", "outputs", "'h' and 'hg' are one value"))
def one_node_for_two_outputs(program: Json) -> None:
    """Writes once, and names it twice."""
    program["outputs"]["h"] = program["outputs"]["hg"]


@cheat(rejected("contract", "outputs", "is the input 'x' itself"))
def an_input_for_an_output(program: Json) -> None:
    """Returns a buffer that already holds numbers."""
    program["outputs"]["h"] = program["nodes"].index(["input", [], "x"])


# Operations, and what they name


@cheat(refused("operation", "no operation 'system'"))
def an_operation_of_its_own(program: Json) -> None:
    """Names a function that some library has."""
    node(program, "rsqrt")[0] = "system"


@cheat(refused("operation", "no operation '__class__'"))
def an_attribute_for_an_operation(program: Json) -> None:
    """Names what every object has."""
    node(program, "rsqrt")[0] = "__class__"


@cheat(refused("operation", "no operation"))
def code_for_an_operation(program: Json) -> None:
    """Closes the line that the lowering would write it in."""
    node(program, "rsqrt")[0] = "rsqrt(a)\nimport os #"


@cheat(refused("input", "is no input"))
def code_for_an_input(program: Json) -> None:
    """Closes the string that the lowering would write it in."""
    node(program, "input")[2] = "y']; import os #"


@cheat(refused("input", "is no input"))
def a_surrogate_for_an_input(program: Json) -> None:
    """Neither a file nor a terminal can write this character."""
    node(program, "input")[2] = "\ud800"


@cheat(refused("arguments", "names nothing"))
def an_attribute_where_none_belongs(program: Json) -> None:
    """A payload on a sum."""
    node(program, "add")[2] = "import os"


@cheat(refused("arguments", "takes 2 argument(s), not 1"))
def an_argument_missing(program: Json) -> None:
    """A sum of one."""
    node(program, "add")[1].pop()


@cheat(refused("arguments", "row_sums takes one tile"))
def a_vector_for_a_tile(program: Json) -> None:
    """The row sums of a vector."""
    gamma = program["nodes"].index(["input", [], "gamma"])
    node(program, "row_sums")[1][0] = gamma


@cheat(refused("shapes", "the inner sizes"))
def a_product_that_does_not_fit(program: Json) -> None:
    """Multiplies y by w, not by its transpose: the row's end would be read past."""
    node(program, "gemm")[1] = [0, 1]


@cheat(refused("arguments", "a constant is one number"))
def a_text_for_a_constant(program: Json) -> None:
    """A text where the lowering writes a number."""
    node(program, "constant")[2] = "1e-6"


@cheat(refused("dim", "dims that the spec does not declare"))
def a_size_of_its_own(program: Json) -> None:
    """A dim that nobody gives a value."""
    node(program, "dim")[2] = "Q"


@cheat(refused("dim", "is written 'N'"))
def a_size_with_a_comment(program: Json) -> None:
    """Another text of the same program, and so another hash."""
    node(program, "dim")[2] = "N#x"


@cheat(refused("dim", "is written 'N'"))
def a_size_in_wide_letters(program: Json) -> None:
    """Python reads them as the narrow ones."""
    node(program, "dim")[2] = "\uff2e"


@cheat(refused("dim", "is no integer polynomial"))
def code_for_a_size(program: Json) -> None:
    """A size that is parsed as Python."""
    node(program, "dim")[2] = "__import__('os')"


@cheat(refused("dim", "is no integer polynomial"))
def a_power_of_a_size(program: Json) -> None:
    """A number with more digits than memory."""
    node(program, "dim")[2] = "9**9**9**9"


@cheat(refused("width", "divisible"), QK_NORM)
def heads_of_no_width(program: Json) -> None:
    """Divides by zero columns."""
    node(program, "head_sums")[2] = "0"


@cheat(refused("output_shape", "'rstd' is head statistic [M, 1]"), QK_NORM)
def one_head_for_all(program: Json) -> None:
    """A head as wide as the tile, which no CTA sees whole."""
    node(program, "head_sums")[2] = "2*H*P"


@cheat(refused("dtype", "index is an input"), CROSS_ENTROPY)
def a_computed_index(program: Json) -> None:
    """An index that may point anywhere."""
    select = node(program, "row_select")
    lse = program["nodes"].index(node(program, "row_logsumexp"))
    select[1][1] = lse


# Wrong mathematics that no tracer wrote


@cheat(wrong("h"))
def outputs_swapped(program: Json) -> None:
    """h and hg are of one shape."""
    outputs = program["outputs"]
    outputs["h"], outputs["hg"] = outputs["hg"], outputs["h"]


@cheat(wrong("rstd"))
def epsilon_of_zero(program: Json) -> None:
    """The constant's value is the program's, whatever the spec says."""
    node(program, "constant")[2] = ["float", "0x0p+0"]


@cheat(wrong("rstd"))
def a_size_of_the_wrong_axis(program: Json) -> None:
    """Divides by the rows."""
    node(program, "dim")[2] = "M"


@cheat(wrong("rstd"))
def a_size_beyond_any_integer(program: Json) -> None:
    """A product of sizes that no 64 bits hold."""
    node(program, "dim")[2] = "*".join("N" * 16)


@cheat(wrong("z"), CHAIN)
def a_maximum_for_a_product(program: Json) -> None:
    """One word of the text changed."""
    program["nodes"][program["outputs"]["z"]][0] = "maximum"


@cheat(wrong("z"), CHAIN)
def an_operand_of_another_step(program: Json) -> None:
    """The second gemm reads h, not h times the norm's weight, which is still computed."""
    second = [n for n in program["nodes"] if n[0] == "gemm"][1]
    weighted, h = second[1][0], program["outputs"]["h"]
    second[1][0] = h
    scaled = program["outputs"]["z"]
    zero = add(program, "constant", [], ["float", "0x0p+0"])
    nothing = add(program, "multiply", [add(program, "row_sums", [weighted]), zero])
    program["outputs"]["z"] = add(program, "add", [scaled, add(program, "per_row", [nothing])])


@cheat(wrong("rstd"))
def a_size_for_a_size(program: Json) -> None:
    """As many columns as the 1B case has."""
    node(program, "dim")[2] = "2048"


CHEATS = tuple(cheat.cheats)
