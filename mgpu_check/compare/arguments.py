"""Read arguments of a script that depend on its number of processes: ``--batch-size={64/W}``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from fractions import Fraction

# Other braces, such as those of JSON, belong to the script.
_EXPRESSION = re.compile(r"\{([\dW.+\-*/%() ]*W[\dW.+\-*/%() ]*)\}")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def fitted(words: Sequence[str], world: int) -> list[str]:
    """Return the words with each ``{…W…}`` replaced by its value, where W is `world`.

    An expression without a decimal point must have an integer value: ``{64/W}`` is 16 for 4 processes. With a decimal
    point, as in ``{0.1*W}``, the value is a float.

    Raises:
        ValueError: an expression is invalid, or its value is not an integer.
    """
    return [_EXPRESSION.sub(lambda match: _value(match[1], world), word) for word in words]


def accepted(text: str) -> tuple[str, str]:
    """Return the pattern and the reason in an option ``--unjudged='PATTERN=reason'``.

    Raises:
        ValueError: the pattern or the reason is missing.
    """
    pattern, _, reason = (piece.strip() for piece in text.partition("="))
    if not pattern or not reason:
        raise ValueError(
            f"{text!r} lacks a pattern or a reason; give PATTERN=reason, as in 'head.*=frozen after step 1'"
        )
    return pattern, reason


def _value(text: str, world: int) -> str:
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body, world)
    except (SyntaxError, ArithmeticError, TypeError) as error:
        raise ValueError(
            f"{{{text}}} is not a valid expression for W = {world}; use numbers, W, parentheses and + - * / // %, as "
            "in {64/W}"
        ) from error
    if "." in text:
        return repr(float(value))
    if value.denominator != 1:
        raise ValueError(
            f"{{{text}}} is not an integer for W = {world}; choose a number of ranks that divides it, or write "
            f"{{{text.replace('/', '//')}}} to round it down"
        )
    return str(value.numerator)


def _evaluate(node: ast.expr, world: int) -> Fraction:
    if isinstance(node, ast.Name) and node.id == "W":
        return Fraction(world)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(repr(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate(node.operand, world)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: Fraction = _OPERATORS[type(node.op)](_evaluate(node.left, world), _evaluate(node.right, world))
        return Fraction(result)
    raise TypeError("no number")
