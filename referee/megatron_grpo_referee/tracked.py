"""Arrays for gradients by autograd without torch, whose import takes longer than the rest of `referee`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from autograd.tracer import getval

_clip = primitive(np.clip)
defvjp(_clip, lambda clipped, x, *bounds: lambda g: g * (clipped == x), argnums=(0,))  # 1 at a bound, as torch's; autograd's own is 0


def _make_unary(function: Callable[[Any], Any]) -> Callable[[Any], Tracked]:
    return lambda self: Tracked(function(self.array))


def _make_binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Tracked]:
    return lambda self, other: Tracked(function(self.array, getattr(other, "array", other)))


def _reversed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Tracked]:
    return _make_binary(lambda x, y: function(y, x))


class Tracked:
    """Array with the methods of a torch tensor that `reference` calls.

    Args:
        array: Numbers, [T] or a scalar: a numpy array or an autograd box.
    """

    __array_ufunc__ = None  # numpy leaves `array * tracked` to this class

    def __init__(self, array: Any):
        self.array = array

    @property
    def value(self) -> np.ndarray:
        """Numbers of the array."""
        return np.asarray(getval(self.array), dtype=np.float64)

    _operators = (operator.add, operator.sub, operator.mul, operator.truediv)
    __add__, __sub__, __mul__, __truediv__ = map(_make_binary, _operators)
    __radd__, __rsub__, __rmul__, __rtruediv__ = map(_reversed, _operators)
    __gt__, __ge__, __le__, __eq__ = map(_make_binary, (operator.gt, operator.ge, operator.le, operator.eq))  # type: ignore[assignment]
    __hash__ = object.__hash__
    __neg__, exp, log, sum = map(_make_unary, (operator.neg, anp.exp, anp.log, anp.sum))
    detach, double = map(_make_unary, (getval, lambda x: x * 1.0))
    sigmoid = _make_unary(lambda x: 1.0 / (1.0 + anp.exp(-x)))
    minimum = _make_binary(anp.minimum)

    def clamp(self, min: float = -np.inf, max: float = np.inf) -> Tracked:
        """Return the numbers clamped to two bounds."""
        return Tracked(_clip(self.array, min, max))

    def where(self, condition: Tracked, other: Tracked) -> Tracked:
        """Return these numbers where the condition holds, else the other ones."""
        return Tracked(anp.where(condition.value != 0, self.array, other.array))

    def nan_to_num(self, nan: float) -> Tracked:
        """Return the numbers with NaN replaced."""
        return Tracked(anp.where(np.isnan(self.value), nan, self.array))

    def new_tensor(self, values: Sequence[float]) -> Tracked:
        """Return numbers as constants."""
        return Tracked(np.array(values))

    def item(self) -> float:
        """Return the number of a scalar."""
        return float(self.value)

    def tolist(self) -> Any:
        """Return the numbers as Python floats."""
        return self.value.tolist()

    __float__ = item

    def __bool__(self) -> bool:
        return bool(self.value)


def value_and_gradients(loss: Callable[[list[Tracked]], Any], arrays: Sequence[np.ndarray]) -> tuple[float, list[np.ndarray]]:
    """Return a loss and its derivative by each array.

    Args:
        arrays: Arrays of float64.
    """
    value, gradients = autograd.value_and_grad(lambda given: (loss([Tracked(one) for one in given]) * Tracked(1.0)).array)(list(arrays))
    return float(value), gradients
