"""Bugs by small changes of a module: each changes one place of the syntax tree."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "%",
    ast.Mod: "//",
    ast.Div: "*",
}
_AUGMENTED = {ast.Add: "-=", ast.Sub: "+="}
_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
_DROPPED = frozenset(("sorted", "abs", "reversed", "int", "str", "list", "sum", "merge", "parse"))
_DROPPED_METHODS = frozenset(("strip", "rstrip", "lstrip", "lower", "upper", "sort"))


@dataclass(frozen=True, order=True)
class Mutant:
    """A change: characters `start` to `end` of the module become `text`."""

    start: int
    end: int
    text: str
    kind: str
    line: int
    """1-based line of the change."""

    @property
    def key(self) -> str:
        """Identifies it within its module."""
        whole = f"{self.kind} {self.start} {self.end} {self.text}"
        return hashlib.sha256(whole.encode()).hexdigest()[:10]

    def applied(self, source: str) -> str:
        """Return the source with the bug."""
        return source[: self.start] + self.text + source[self.end :]


def mutants(source: str) -> list[Mutant]:
    """Return every change after which the module can be parsed, in the order of the text."""
    found = set()
    for mutant in _Places(source).all():
        changed = mutant.applied(source)
        try:
            ast.parse(changed)
        except SyntaxError:
            continue
        if changed != source:
            found.add(mutant)
    return sorted(found)


class _Places:
    """Finds changes in a module's syntax tree. Positions are characters, so it must be ASCII."""

    def __init__(self, source: str) -> None:
        source.encode("ascii")
        self.source = source
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def all(self) -> Iterator[Mutant]:
        for node in self._nodes(self.tree):
            yield from self._of(node)

    def _nodes(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield all nodes but annotations and f-strings (older Pythons lack their positions)."""
        if isinstance(node, ast.JoinedStr):
            return
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._nodes(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                yield self._change(node, str(value + 1), "off by one")
                if value > 0:
                    yield self._change(node, str(value - 1), "off by one")
            case ast.Call():
                yield from self._calls(node)
            case ast.FunctionDef(args=args):
                yield from self._defaults(args)
            case ast.If():
                yield from self._branches(node)
            case ast.expr() | ast.AugAssign():
                yield from self._operators(node)

    def _operators(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                for text in _COMPARE.get(type(op), ()):
                    yield self._between(left, right, text, "comparison")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                yield self._between(left, right, _ARITHMETIC[type(op)], "operator")
            case ast.AugAssign(target=target, op=op, value=value) if type(op) in _AUGMENTED:
                yield self._between(target, value, _AUGMENTED[type(op)], "operator")
            case ast.BoolOp(op=op, values=[first, second, *_]):
                text = "or" if isinstance(op, ast.And) else "and"
                yield self._between(first, second, text, "and for or")
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield self._change(node, self._text(operand), "dropped sign")

    def _calls(self, node: ast.Call) -> Iterator[Mutant]:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[argument, *_]) if name in _DROPPED:
                yield self._change(node, self._text(argument), "dropped call")
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _DROPPED_METHODS:
                yield self._change(node, self._text(value), "dropped call")
        if isinstance(node.func, ast.Name) and node.func.id in _OTHER_NAME:
            yield self._change(node.func, _OTHER_NAME[node.func.id], "wrong function")
        if len(node.args) == 2 and not any(isinstance(a, ast.Starred) for a in node.args):
            one, two = node.args
            start, end = self._span(one)[0], self._span(two)[1]
            between = self.source[self._span(one)[1] : self._span(two)[0]]
            text = self._text(two) + between + self._text(one)
            yield Mutant(start, end, text, "swapped arguments", one.lineno)

    def _defaults(self, args: ast.arguments) -> Iterator[Mutant]:
        for default in args.defaults:
            match default:
                case ast.Constant(value=bool() as value):
                    yield self._change(default, str(not value), "wrong default")
                case ast.Constant(value=int() as value):
                    yield self._change(default, str(value + 2), "wrong default")

    def _branches(self, node: ast.If) -> Iterator[Mutant]:
        start, _ = self._span(node)
        keyword = self.source[start : start + 2] == "if"  # not an elif
        if keyword and not node.orelse:
            begin = self.starts[node.lineno - 1]
            last = self.starts[node.end_lineno or node.lineno]
            yield Mutant(begin, last, "", "missing branch", node.lineno)
        yield self._change(node.test, f"not ({self._text(node.test)})", "wrong branch")

    def _between(self, left: ast.expr, right: ast.expr, text: str, kind: str) -> Mutant:
        """Replace the operator between two expressions, and keep brackets and blanks around it."""
        start, end = self._span(left)[1], self._span(right)[0]
        old = self.source[start:end]
        core = old.strip("() \n")
        at = start + old.index(core)
        return Mutant(at, at + len(core), text, kind, right.lineno)

    def _change(self, node: ast.expr, text: str, kind: str) -> Mutant:
        start, end = self._span(node)
        return Mutant(start, end, text, kind, node.lineno)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self.source[start:end]
