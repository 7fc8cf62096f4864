"""Mutations of a matrix that a matmul reads. A matmul can read an input or a tile of an earlier step, but not
an expression over inputs. So these mutations add two matmuls that are otherwise not needed, and compute the
changed matrix in the epilogue of the second matmul."""

from __future__ import annotations

from benchmarks.campaign.graph import Skip
from benchmarks.campaign.mutations.site import Edit, Site


def on_operand(site: Site) -> str:
    """Make a matrix wrong before a matmul reads it: scale the whole matrix, or change the elements for which
    a comparison holds."""
    product = site.node("gemm")
    position = site.random.randrange(2)
    reader, matrix = product, site.graph.nodes[product].args[position]
    if site.graph.nodes[matrix].op == "transpose":
        reader, position, matrix = matrix, 0, site.graph.nodes[matrix].args[0]
    if site.graph.nodes[matrix].op != "input" or site.graph.types[matrix].kind != "tile":
        raise Skip("only an input is computed anew")
    if site.random.random() < 0.3:
        share = 10 ** site.random.uniform(-2, -0.3) * site.random.choice((-1, 1))
        wrong, words = site.add("multiply", matrix, 1 + share), f"off by {share:.3g}"
    else:
        condition, where = site.condition(matrix)
        wrong, words = site.add("where", condition, site.wrong(matrix), matrix), f"wrong where {where}"
    site.graph.rewire(reader, position, anew(site, matrix, wrong))
    return f"{site.name(matrix)} {words}, as operand of {site.name(product)}"


def anew(site: Site, matrix: int, value: int) -> int:
    """Add two matmuls that load the matrix, and compute ``value`` in the epilogue of the second."""
    square = site.add("gemm", site.add("transpose", matrix), matrix)
    unneeded = site.add("multiply", site.add("gemm", matrix, square), 0.0)
    return site.add("add", value, unneeded)


KINDS: dict[str, Edit] = {"on an operand": on_operand}
