"""Rules that rewrite a program but keep its meaning. A rule picks a random node with a suitable operation,
replaces the node, and returns the node's name. The rule raises Skip if no node has a suitable operation, or
if the picked node cannot be replaced. Each rule is chosen so that the rewritten program is at least as
accurate as code that a sensible author would write."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from benchmarks.campaign.graph import Graph, Skip
from coda_agent.primitives.lang.ir import Node

Rule = Callable[[Graph, Random], str]
Made = Callable[[Graph, Node, Random], int]


def rule(*ops: str) -> Callable[[Made], Rule]:
    """Turn a function into a rule. Given a node with one of the operations ``ops``, the function builds the
    node's replacement."""

    def decorate(make: Made) -> Rule:
        def applied(graph: Graph, random: Random) -> str:
            places = [i for i in range(graph.first_added) if graph.nodes[i].op in ops]
            if not places:
                raise Skip("it has no such node")
            index = random.choice(places)
            words = f"{graph.nodes[index].op}#{index}"
            graph.replace(index, make(graph, graph.nodes[index], random))
            return words

        return applied

    return decorate


def known(graph: Graph, index: int, *ops: str) -> Node:
    """Return the node if it has one of these operations; otherwise raise Skip."""
    if graph.nodes[index].op not in ops:
        raise Skip("the node has another operation")
    return graph.nodes[index]
