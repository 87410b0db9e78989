"""Arrays that remember how they were made, for gradients without torch: importing torch takes longer than all else that `referee` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Backward = Callable[[Any], Any]  # gradient of the result -> gradient of one operand, before it is summed to the operand's shape


def _comparison(operation: Callable[[Any, Any], Any]) -> Callable[[Tracked, Any], Tracked]:
    return lambda self, other: Tracked(operation(self.value, _tracked(other).value))


class Tracked:
    """A float64 array with those methods of a torch tensor that `reference` calls.

    Args:
        value: Numbers, [T] or a scalar.
        operands: (operand, its backward) of the operation that made it.
    """

    __array_ufunc__ = None  # numpy leaves `array * tracked` to this class

    def __init__(self, value: Any, operands: Sequence[tuple[Tracked, Backward]] = ()):
        self.value = np.asarray(value, dtype=np.float64)
        self.operands = operands
        self.grad: Any = np.zeros_like(self.value)

    def backward(self) -> None:
        """Add the gradient of this scalar to `grad` of all arrays that it was made from."""
        order: list[Tracked] = []
        seen, stack = set[int](), [(self, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order.append(node)
            elif id(node) not in seen:
                seen.add(id(node))
                stack += [(node, True), *((operand, False) for operand, _ in node.operands)]
        self.grad = np.ones_like(self.value)
        for node in reversed(order):
            for operand, backward in node.operands:
                part = backward(node.grad)
                operand.grad = operand.grad + (np.sum(part) if operand.value.ndim == 0 else part)

    def __add__(self, other: Any) -> Tracked:
        other = _tracked(other)
        return Tracked(self.value + other.value, [(self, lambda g: g), (other, lambda g: g)])

    def __mul__(self, other: Any) -> Tracked:
        other = _tracked(other)
        return Tracked(self.value * other.value, [(self, lambda g: g * other.value), (other, lambda g: g * self.value)])

    def __truediv__(self, other: Any) -> Tracked:
        other = _tracked(other)
        value = self.value / other.value
        return Tracked(value, [(self, lambda g: g / other.value), (other, lambda g: -g * value / other.value)])

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Tracked:
        return self * -1.0

    def __sub__(self, other: Any) -> Tracked:
        return self + _tracked(other) * -1.0

    def __rsub__(self, other: Any) -> Tracked:
        return _tracked(other) - self

    def __rtruediv__(self, other: Any) -> Tracked:
        return _tracked(other) / self

    def _of(self, value: Any, slope: Any) -> Tracked:
        return Tracked(value, [(self, lambda g: g * slope)])

    def exp(self) -> Tracked:
        """Return e to the power of each number."""
        return self._of(value := np.exp(self.value), value)

    def log(self) -> Tracked:
        """Return natural logarithms."""
        return self._of(np.log(self.value), 1.0 / self.value)

    def sigmoid(self) -> Tracked:
        """Return 1 / (1 + exp(-x))."""
        return self._of(value := 1.0 / (1.0 + np.exp(-self.value)), value * (1.0 - value))

    def clamp(self, min: float = -np.inf, max: float = np.inf) -> Tracked:
        """Return the numbers inside two bounds. At a bound the gradient is 1, as torch's."""
        return self._of(self.value.clip(min, max), (self.value >= min) & (self.value <= max))

    def minimum(self, other: Tracked) -> Tracked:
        """Return the smaller of each pair. Where they are equal both get half of the gradient, as torch's."""
        share = 0.5 * ((self.value < other.value) + (self.value <= other.value) * 1.0)
        value = np.minimum(self.value, other.value)
        return Tracked(value, [(self, lambda g: g * share), (other, lambda g: g * (1.0 - share))])

    def where(self, condition: Tracked, other: Tracked) -> Tracked:
        """Return these numbers where the condition holds, else the other ones."""
        is_mine = condition.value != 0
        value = np.where(is_mine, self.value, other.value)
        return Tracked(value, [(self, lambda g: np.where(is_mine, g, 0.0)), (other, lambda g: np.where(is_mine, 0.0, g))])

    def nan_to_num(self, nan: float) -> Tracked:
        """Return the numbers with NaN replaced."""
        return self._of(np.where(np.isnan(self.value), nan, self.value), ~np.isnan(self.value))

    def sum(self) -> Tracked:
        """Return the sum of all numbers."""
        return self._of(self.value.sum(), np.ones_like(self.value))

    def detach(self) -> Tracked:
        """Return the same numbers as constants."""
        return Tracked(self.value)

    def double(self) -> Tracked:
        """Return itself: it is float64."""
        return self

    def new_tensor(self, values: Sequence[float]) -> Tracked:
        """Return constants."""
        return Tracked(values)

    def item(self) -> float:
        """Return the number of a scalar."""
        return float(self.value)

    def tolist(self) -> Any:
        """Return the numbers as Python's."""
        return self.value.tolist()

    __gt__, __ge__, __le__ = _comparison(np.greater), _comparison(np.greater_equal), _comparison(np.less_equal)
    __eq__ = _comparison(np.equal)  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __len__(self) -> int:
        return len(self.value)


def _tracked(value: Any) -> Tracked:
    return value if isinstance(value, Tracked) else Tracked(value)
