"""Owns what a test expects, while a program runs: right answers stay in this process, where the program cannot read them.

`assert f(2) == 4` becomes `assert __held__(0, f(2))`: the program's process works out `f(2)` and says it, this one compares. A frame, the
garbage collector or a pointer leads a program to what is in its own process, and to nothing else.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from megatron_grpo.rewards.builtin.jail import canonical, exactly

NAME = "__held__"
_NUMBER = 400  # digits of a number that is compared by its distance


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an `assert` compares with. text: the literal, as the other side would say it. below: it may be this far off, or not quite.

    expression: the comparison, of `value`, for values that have no canonical text. is_sure: it runs exactly once in a test that passes.
    """

    text: str
    expression: str
    differs: bool = False
    is_identity: bool = False
    below: tuple[float, bool] | None = None
    is_sure: bool = False

    def admits(self, text: str) -> bool:
        """Whether the assertion holds for the value with this text."""
        if self.below is None:
            return (text == self.text) != self.differs
        try:
            distance = abs(_number(text) - _number(self.text))
        except (ValueError, OverflowError):
            return False
        most, inclusive = self.below
        return distance < most or (inclusive and distance == most)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTest:
    """A test as the program's process gets it, and what it does not get."""

    source: str
    expected: tuple[Expected, ...]

    def message(self, word: str) -> dict[str, Any]:
        exact = [number for number, one in enumerate(self.expected) if one.is_identity]
        return {"word": word, "name": NAME, "test": self.source, "exact": exact}


def hold(test: str) -> HeldTest:
    """A test without the literals that an `assert` compares with: `==`, `!=`, `is`, `is not`, `abs(... - literal) < literal`."""
    try:
        tree = ast.parse(test)
        taker = _Taker({id(statement) for statement in tree.body})
        taker.visit(tree)
        return HeldTest(source=ast.unparse(ast.fix_missing_locations(tree)) if taker.expected else test, expected=tuple(taker.expected))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of a test that nobody can run: it fails where it is compiled
        return HeldTest(source=test, expected=())


class _Taker(ast.NodeTransformer):
    def __init__(self, sure: set[int]):
        self.sure, self.expected = sure, list[Expected]()

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        is_sure = id(node) in self.sure
        taken = _equality(node.test, is_sure) or _distance(node.test, is_sure)
        if taken is not None:
            value, expected = taken
            place = ast.Constant(len(self.expected))
            node.test = ast.Call(func=ast.Name(NAME, ast.Load()), args=[place, value], keywords=[])
            self.expected.append(expected)
        return node


def _equality(test: ast.expr, is_sure: bool) -> tuple[ast.expr, Expected] | None:
    match test:
        case ast.Compare(left, [(ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot()) as operator], [right]):
            literals = [_literal(left), _literal(right)]
        case _:
            return None
    if sum(one is not None for one in literals) != 1:
        return None
    is_identity = isinstance(operator, (ast.Is, ast.IsNot))
    literal, value = (literals[0], right) if literals[1] is None else (literals[1], left)
    assert literal is not None
    text = exactly(*literal) if is_identity else canonical(*literal)
    if text is None or (is_identity and not (literal[0] is None or isinstance(literal[0], bool))):
        return None
    compared = ast.Compare(_VALUE, [operator], [right]) if literals[0] is None else ast.Compare(left, [operator], [_VALUE])
    differs = isinstance(operator, (ast.NotEq, ast.IsNot))
    return value, Expected(text=text, expression=ast.unparse(compared), differs=differs, is_identity=is_identity, is_sure=is_sure)


def _distance(test: ast.expr, is_sure: bool) -> tuple[ast.expr, Expected] | None:
    match test:
        case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(value, ast.Sub(), right)], []), [(ast.Lt() | ast.LtE()) as operator], [most]):
            expected, bound = _literal(right), _literal(most)
        case _:
            return None
    if expected is None or bound is None or _literal(value) is not None or {type(*expected), type(*bound)} - {int, float}:
        return None
    text, inclusive = canonical(*expected), isinstance(operator, ast.LtE)
    if text is None:
        return None
    distance = ast.unparse(ast.BinOp(_VALUE, ast.Sub(), right))
    expression = f"abs({distance}) {'<=' if inclusive else '<'} {ast.unparse(most)}"
    return value, Expected(text=text, expression=expression, below=(*bound, inclusive), is_sure=is_sure)


_VALUE = ast.Name("value", ast.Load())


def _literal(node: ast.expr) -> list[Any] | None:
    """[its value], or None for what is no literal."""
    try:
        return [ast.literal_eval(node)]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _number(text: str) -> float:
    if len(text) > _NUMBER:
        raise ValueError(text[:_NUMBER])
    return int(text) if text.lstrip("-").isdecimal() else float(text)
