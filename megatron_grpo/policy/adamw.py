"""AdamW whose weights and moments are kept in the dtypes that settings name (`use_precision_aware_optimizer`), on any device.

To Megatron-Core's distributed optimizer it is what Transformer Engine's FusedAdam is in that mode: it holds the main weights, takes
gradients from `decoupled_grad` in the dtype of their buffer, and answers `get_unscaled_state` and `set_scaled_state`. It stands in that
place with Transformer Engine too, so that a laptop and a cluster keep the same numbers. A step is torch's own, in float32, block by block:
what is kept is read into float32, moved, and rounded again. So beside what is kept there is never more than one block in float32.

float16 and FP8 (E4M3) are kept with a scale for each block. It is a power of two: what is read and kept again is the same to the bit, which
is what makes a resumed run the run that went on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw

from megatron_grpo.config.optimizer import BLOCK

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
# Of those with a scale: the largest number that a block's largest becomes, and the smallest there is above zero.
_LARGEST = {torch.float16: 2.0**15, torch.float8_e4m3fn: 448.0}
_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}


class AdamW(torch.optim.Optimizer):
    """Parameters are flat and need not be whole. One in float32 is its own main weight; of any other there is one besides."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, main_params_dtype: str, exp_avg_dtype: str, exp_avg_sq_dtype: str):
        """groups: as Megatron-Core has cut them, each with lr, betas, eps and weight_decay; they are taken as they are."""
        super().__init__(groups, {})
        names = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": main_params_dtype}
        self._dtypes = {name: DTYPES[dtype] for name, dtype in names.items()}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._lent: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for group in self.param_groups:
            group["step"] = 0
            for parameter in group["params"]:
                self.state[parameter] = {name: self._nothing(parameter, name) for name in self._dtypes}
                self._scales[parameter] = {name: _ones(parameter) for name in self._dtypes}
        self.reload()

    @property
    def rounds_weights(self) -> bool:
        """Whether main weights are not float32, so that keeping them may change the model's: these are what the kept ones round to."""
        return self._dtypes["master_param"] is not torch.float32

    @torch.no_grad()
    def reload(self) -> None:
        """Main weights are what the model's are now; moments stay. Where `rounds_weights`, other ranks do not yet know this one's share."""
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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody has a closure
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if getattr(parameter, "decoupled_grad", None) is not None:
                    for number, part in _blocks(parameter):
                        self._move(parameter, number, part, group)

    def _move(self, parameter: torch.Tensor, number: int, part: slice, group: dict[str, Any]) -> None:
        now = {name: self._read(parameter, name, number, part) for name in self._dtypes}
        beta1, beta2 = group["betas"]
        adamw(
            [now["master_param"]], [parameter.decoupled_grad[part].float()],  # type: ignore[attr-defined]  # Megatron's
            [now["exp_avg"]], [now["exp_avg_sq"]], [], [torch.tensor(float(group["step"] - 1))], amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        for name, values in now.items():
            self._keep(parameter, name, number, part, values)
        if parameter.dtype is not torch.float32:  # what is kept of the main weight, not what it was before it was rounded
            parameter[part].copy_(self._read(parameter, "master_param", number, part))

    def _read(self, parameter: torch.Tensor, name: str, number: int, part: slice) -> torch.Tensor:
        """In float32: what lies there itself where it is float32, else a copy."""
        kept = self.state[parameter][name][part]
        return kept.float() * self._scales[parameter][name][number] if kept.dtype in _LARGEST else kept.float()

    def _keep(self, parameter: torch.Tensor, name: str, number: int, part: slice, values: torch.Tensor) -> None:
        kept = self.state[parameter][name][part]
        if kept.dtype in _LARGEST and values.numel():
            scale = _scale_of(values, _LARGEST[kept.dtype])
            self._scales[parameter][name][number] = scale
            scaled = values / scale
            if name == "exp_avg_sq":
                # One that is above zero stays so: a step divides by its root, and what is lost would make it without bound.
                scaled = torch.where(values > 0, scaled.clamp(min=_SMALLEST[kept.dtype]), scaled)
            values = scaled
        if values.data_ptr() != kept.data_ptr():
            kept.copy_(values)

    # ---- what Megatron-Core and checkpoints ask for ----------------------------------------------------------------------------------

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """In float32: the state itself, or a copy of one that is kept in another dtype."""
        kept = self.state[parameter][name]
        if kept.dtype is torch.float32:
            return kept
        return torch.cat([self._read(parameter, name, number, part) for number, part in _blocks(parameter)] or [kept.float()])

    @torch.no_grad()
    def set_scaled_state(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """values: float32, on any device."""
        for number, part in _blocks(parameter):
            self._keep(parameter, name, number, part, values[part].to(parameter.device))

    def is_kept_in_float32(self, parameter: torch.Tensor, name: str) -> bool:
        return self.state[parameter][name].dtype is torch.float32

    def lend(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Float32 on the host, to be read into; `take_back` keeps what then lies there."""
        lent = self._lent.setdefault(parameter, {})
        lent[name] = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
        return lent[name]

    @torch.no_grad()
    def take_back(self) -> None:
        """As `reload`, of all that was lent."""
        for parameter, states in self._lent.items():
            for name, values in states.items():
                self.set_scaled_state(parameter, name, values)
            self._settle(parameter)
        self._lent.clear()


def _blocks(parameter: torch.Tensor) -> Iterator[tuple[int, slice]]:
    for number, first in enumerate(range(0, parameter.numel(), BLOCK)):
        yield number, slice(first, min(first + BLOCK, parameter.numel()))


def _ones(parameter: torch.Tensor) -> torch.Tensor:
    return torch.ones(-(-parameter.numel() // BLOCK), dtype=torch.float32, device=parameter.device)


def _scale_of(values: torch.Tensor, largest: float) -> torch.Tensor:
    """The least power of two by which the largest of `values` is divided to at most `largest`; 1 where all are zero, or one is no number.

    The least: of numbers that have been kept once it is the same again, or half of it where the largest was rounded down to a power of two,
    and then all the others double without loss.
    """
    part, exponent = torch.frexp(values.abs().amax() / largest)
    exponent = (exponent - (part == 0.5).to(exponent.dtype)).clamp(-126, 127)
    bits = ((exponent + 127) << 23).to(torch.int32)  # by its bits, for not every device's `exp2` is exact
    return torch.where((part > 0) & part.isfinite(), bits.view(torch.float32), torch.ones_like(part))
