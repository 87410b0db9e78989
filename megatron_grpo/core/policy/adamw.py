"""AdamW with weights and moments in the dtypes of the settings (`use_precision_aware_optimizer`), on any device.

For Megatron-Core's distributed optimizer it takes the place of Transformer Engine's FusedAdam in that mode: it holds the main weights,
reads gradients from `decoupled_grad` in the dtype of their buffer, and implements `get_unscaled_state` and `set_scaled_state`. It is used
with Transformer Engine too, so that a laptop and a cluster compute the same numbers. A step is torch's own, in float32, block by block: the
stored state is converted to float32, updated, and rounded again. So beside the stored state there is never more than one block in float32.

float16 and FP8 (E4M3) are stored with one scale per block. The scale is a power of two: state that is read and stored again is the same to
the bit, so that a resumed run is the same as one without interruption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw

from megatron_grpo.core.policy.requirements import BLOCK

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
# For dtypes with a scale: the bound for the largest scaled number of a block, and the smallest positive number of the dtype.
_LARGEST = {torch.float16: 2.0**15, torch.float8_e4m3fn: 448.0}
_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}


class AdamW(torch.optim.Optimizer):
    """AdamW that stores main weights and moments in chosen dtypes.

    Parameters are flat and may be parts of weights. A float32 parameter is its own main weight; any other parameter has a separate one.

    Args:
        groups: Parameter groups as Megatron-Core has made them, each with lr, betas, eps and weight_decay; they are used unchanged.
        main_params_dtype: "fp32" or "fp16", the dtype of the main weights; a key of `DTYPES`.
        exp_avg_dtype: Dtype of the first moments; a key of `DTYPES`.
        exp_avg_sq_dtype: Dtype of the second moments; a key of `DTYPES`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, main_params_dtype: str, exp_avg_dtype: str, exp_avg_sq_dtype: str):
        super().__init__(groups, {})
        names = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": main_params_dtype}
        self._dtypes = {name: DTYPES[dtype] for name, dtype in names.items()}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._lent: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for group in self.param_groups:
            group["step"] = 0
            for parameter in group["params"]:
                self.state[parameter] = {name: self._nothing(parameter, name) for name in self._dtypes}
                scales = torch.ones(-(-parameter.numel() // BLOCK), dtype=torch.float32, device=parameter.device)
                self._scales[parameter] = {name: scales.clone() for name in self._dtypes}
        self.reload()

    @property
    def rounds_weights(self) -> bool:
        """Whether main weights are not float32. Then storing them may change the model's weights, which are the rounded main weights."""
        return self._dtypes["master_param"] is not torch.float32

    @torch.no_grad()
    def reload(self) -> None:
        """Set the main weights to the model's current weights; moments stay.

        With `rounds_weights` other ranks do not have this rank's rounded weights yet.
        """
        for parameter in self.state:
            self.set_scaled_state(parameter, "master_param", parameter.float())
            self._settle(parameter)

    def _settle(self, parameter: torch.Tensor) -> None:
        if self.rounds_weights and parameter.dtype is not torch.float32:
            parameter.copy_(self.get_unscaled_state(parameter, "master_param"))

    def _nothing(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        if name == "master_param" and parameter.dtype is torch.float32:
            return parameter.detach()
        return torch.zeros(parameter.shape, dtype=self._dtypes[name], device=parameter.device)

    # ---- a step ----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update every parameter that has a gradient in `decoupled_grad`.

        Args:
            closure: Not used; torch's interface has it.
        """
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if getattr(parameter, "decoupled_grad", None) is not None:
                    for number, part in _blocks(parameter):
                        self._move(parameter, number, part, group)

    def _move(self, parameter: torch.Tensor, number: int, part: slice, group: dict[str, Any]) -> None:
        state = {name: self._read(parameter, name, number, part) for name in self._dtypes}
        beta1, beta2 = group["betas"]
        adamw(
            [state["master_param"]], [parameter.decoupled_grad[part].float()],  # type: ignore[attr-defined]  # Megatron's
            [state["exp_avg"]], [state["exp_avg_sq"]], [], [torch.tensor(float(group["step"] - 1))], amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        for name, values in state.items():
            self._keep(parameter, name, number, part, values)
        if parameter.dtype is not torch.float32:  # the main weight as it is stored, not as it was before rounding
            parameter[part].copy_(self._read(parameter, "master_param", number, part))

    def _read(self, parameter: torch.Tensor, name: str, number: int, part: slice) -> torch.Tensor:
        """Return a block of state in float32: the stored block itself if it is float32, else a copy."""
        stored = self.state[parameter][name][part]
        return stored.float() * self._scales[parameter][name][number] if stored.dtype in _LARGEST else stored.float()

    def _keep(self, parameter: torch.Tensor, name: str, number: int, part: slice, values: torch.Tensor) -> None:
        stored = self.state[parameter][name][part]
        if stored.dtype in _LARGEST and values.numel():
            scale = _compute_scale(values, _LARGEST[stored.dtype])
            self._scales[parameter][name][number] = scale
            scaled = values / scale
            if name == "exp_avg_sq":
                # A positive second moment stays positive: a step divides by its root, and a zero would make the step arbitrarily large.
                scaled = torch.where(values > 0, scaled.clamp(min=_SMALLEST[stored.dtype]), scaled)
            values = scaled
        if values.data_ptr() != stored.data_ptr():
            stored.copy_(values)

    # ---- interface for Megatron-Core and checkpoints ---------------------------------------------------------------------------------

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return state in float32: the state itself, or a copy if it is stored in another dtype."""
        stored = self.state[parameter][name]
        if stored.dtype is torch.float32:
            return stored
        return torch.cat([self._read(parameter, name, number, part) for number, part in _blocks(parameter)] or [stored.float()])

    @torch.no_grad()
    def set_scaled_state(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Store state in its dtype.

        Args:
            values: The state, float32, on any device.
        """
        for number, part in _blocks(parameter):
            self._keep(parameter, name, number, part, values[part].to(parameter.device))

    def lend(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a float32 buffer on the host, to be filled; `take_back` stores its contents."""
        buffers = self._lent.setdefault(parameter, {})
        buffers[name] = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
        return buffers[name]

    @torch.no_grad()
    def take_back(self) -> None:
        """Store the contents of all buffers of `lend`. Model weights follow the stored main weights, as in `reload`."""
        for parameter, states in self._lent.items():
            for name, values in states.items():
                self.set_scaled_state(parameter, name, values)
            self._settle(parameter)
        self._lent.clear()


def _blocks(parameter: torch.Tensor) -> Iterator[tuple[int, slice]]:
    for number, first in enumerate(range(0, parameter.numel(), BLOCK)):
        yield number, slice(first, min(first + BLOCK, parameter.numel()))


def _compute_scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the smallest power of two that scales the largest of `values` down to at most `largest`.

    It is 1 if all values are zero or one is not finite. It is the smallest one, so that numbers that were stored once get the same scale
    again; or half of it, if the largest was rounded down to a power of two, and then all other numbers double without loss.
    """
    part, exponent = torch.frexp(values.abs().amax() / largest)
    exponent = (exponent - (part == 0.5).to(exponent.dtype)).clamp(-126, 127)
    bits = ((exponent + 127) << 23).to(torch.int32)  # made from its bits, because `exp2` is not exact on every device
    return torch.where((part > 0) & part.isfinite(), bits.view(torch.float32), torch.ones_like(part))
