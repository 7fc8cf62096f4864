"""How a rule writes a part of a program in another way: it changes a graph at a random place where it
applies, and says where; Skip where there is none. No rule is numerically worse than a sensible author's."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from benchmarks.campaign.graph import Graph, Skip
from coda_agent.primitives.lang.ir import Node

Rule = Callable[[Graph, Random], str]
Made = Callable[[Graph, Node, Random], int]


def rule(*ops: str) -> Callable[[Made], Rule]:
    """Turn what makes another node for one of these operations into a rule."""

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
    """The node, if it has one of these operations; else Skip."""
    if graph.nodes[index].op not in ops:
        raise Skip("another operation stands there")
    return graph.nodes[index]
