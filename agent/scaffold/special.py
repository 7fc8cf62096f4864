"""Simplify a function's body for calls in which some parameters are None. Tests for None are evaluated, and
only the branches that run are kept."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator, Sequence


class Specialised(ast.NodeTransformer):
    """Evaluates tests for None. ``absent``: names that are None until the function assigns them. ``present``:
    names that are never None. ``skipped``: the line numbers of removed code."""

    def __init__(self, absent: Collection[str], present: Collection[str]):
        self.absent, self.present = set(absent), frozenset(present)
        self.skipped: set[int] = set()

    def body(self, statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield the statements that remain, up to and including the first return."""
        for statement in statements:
            for left in self._statement(statement):
                yield left
                if isinstance(left, ast.Return):
                    return

    def _statement(self, node: ast.stmt) -> Iterator[ast.stmt]:
        if isinstance(node, ast.If):
            test = self.visit(copy.deepcopy(node.test))
            if isinstance(test, ast.Constant):
                middle = 1 + (node.body[-1].end_lineno or node.lineno)
                end = 1 + (node.end_lineno or node.lineno)
                self.skipped |= set(range(middle, end) if test.value else range(node.lineno, middle))
                yield from self.body(node.body if test.value else node.orelse)
                return
        if isinstance(node, ast.For):
            self.absent -= _stored(node)  # these names may have a value in the second iteration
            loop = copy.copy(node)
            loop.iter = self.visit(copy.deepcopy(node.iter))
            loop.body = list(self.body(node.body)) or [ast.copy_location(ast.Pass(), node)]
            yield loop
            return
        yield self.visit(copy.deepcopy(node))
        self.absent -= _stored(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        gone = node.id in self.absent and isinstance(node.ctx, ast.Load)
        return ast.copy_location(ast.Constant(None), node) if gone else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Compare(ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(value=None)]):
                return self._decided(node, True)
            case ast.Compare(ops=[ast.IsNot() | ast.NotEq()], comparators=[ast.Constant(value=None)]):
                return self._decided(node, False)
        return node

    def _decided(self, node: ast.Compare, none: bool) -> ast.expr:
        match node.left:
            case ast.Constant(value=value):
                return ast.copy_location(ast.Constant((value is None) is none), node)
            case ast.Name(id=name) if name in self.present:
                return ast.copy_location(ast.Constant(not none), node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=ast.Constant(value=value)):
                return ast.copy_location(ast.Constant(not value), node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        left: list[ast.expr] = []
        for place, value in enumerate(node.values):
            if isinstance(value, ast.Constant) and bool(value.value) is decides:
                left.append(value)
                break
            if not isinstance(value, ast.Constant) or place == len(node.values) - 1:
                left.append(value)
        node.values = left
        return left[0] if len(left) == 1 else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
