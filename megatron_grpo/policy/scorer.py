"""A sharded model that only answers: log-probs and entropies of micro-batches. The policy and its reference score in the same words."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from megatron_grpo.batching.collate import collate
from megatron_grpo.batching.split import BatchCut, deal_scored
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy import pipeline
from megatron_grpo.policy.room import refuse_if_away
from megatron_grpo.policy.router import RouterPass
from megatron_grpo.policy.stream import LocalBatch
from megatron_grpo.types import Extent, MicroBatch, Sequence


class ModelScorer:
    """Every method is collective: all ranks call it. model: this stage's chunks, as Megatron's schedule takes them."""

    def __init__(
        self,
        model: SequenceOf[torch.nn.Module],
        parallel: ParallelState,
        cut: BatchCut,
        *,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        replay: str = "disabled",
    ):
        """around: holds while a pass runs; inside it the model is what is to be asked. replay: a `router_replay_mode`; a reference routes
        for itself."""
        self.model, self.parallel, self.cut, self.around, self.replay = model, parallel, cut, around, replay

    def score(self, sequences: SequenceOf[Sequence], *, temperature: float | None = None) -> list[np.ndarray]:
        """Log-probs of the masked tokens, float32 [T], 0 elsewhere. All ranks pass the same sequences, and all get all of them.

        temperature: instead of the sampling temperature of the run. For a few sequences, such as probes; `logprobs` is for batches.
        """
        if not sequences:
            return []
        filled = deal_scored([Extent(tuple(end - begin for begin, end in one.contexts)) for one in sequences], self.cut)
        portions = filled[self.parallel.dp_rank]
        whole = [*sequences, *[sequences[0]] * sum(len(portion.rows) for mine in filled for portion in mine)]
        micro_batches = [
            collate([whole[i] for i in portion.rows], number=number, alignment=self.cut.alignment, at_least=portion.at_least)
            for number, portion in enumerate(portions)
        ]
        found = {}
        for portion, micro, values in zip(portions, micro_batches, self._last_stage(micro_batches, temperature=temperature), strict=False):
            for place, i in enumerate(portion.rows):
                found[i] = values[micro.sequence == place]
        scored = {i: v for part in collectives.from_all(found if self.parallel.speaks_for_its_rows else {}) for i, v in part.items()}
        return [sequence.spread(scored[i]) for i, sequence in enumerate(sequences)]

    def logprobs(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """float32 [C] of each of this share's micro-batches, on every rank of the share."""
        return self.parallel.from_last_stage(self._last_stage(micro_batches))

    def anchors(self, micro_batches: SequenceOf[MicroBatch]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """As `logprobs`; and under R2 where each token was routed, int16 [T, MoE layers, k]."""
        routing = RouterPass(replays=self.replay == "R3", records=self.replay == "R2")
        values = self.parallel.from_last_stage(self._last_stage(micro_batches, routing=routing))
        if self.replay != "R2":
            return values, None
        config: Any = self.model[0].config
        return values, routing.recorded(micro_batches, self.parallel, (sum(config.moe_layer_freq), config.moe_router_topk))

    def router_pass(self) -> RouterPass:
        """What the routers are told in an ordinary pass."""
        return RouterPass(replays=self.replay != "disabled")

    def last_stage_logprobs(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """As `logprobs`, on ranks of the last pipeline stage, where the loss asks; an empty list elsewhere."""
        return self._last_stage(micro_batches)

    def last_stage_entropies(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """float32 [C] of each micro-batch, in nats, on ranks of the last pipeline stage; an empty list elsewhere."""

        def reader(batch: MicroBatch, local: LocalBatch, logprobs, entropy):
            return self.whole(batch, local, entropy)

        refuse_if_away(self.model)
        with self.around():
            return pipeline.read(self.model, micro_batches, reader, self.parallel, with_entropy=True, routing=self.router_pass())

    def _last_stage(
        self, micro_batches: SequenceOf[MicroBatch], *, temperature: float | None = None, routing: RouterPass | None = None
    ) -> list[np.ndarray]:
        def reader(batch: MicroBatch, local: LocalBatch, logprobs, entropy):
            return self.whole(batch, local, logprobs)

        refuse_if_away(self.model)
        with self.around():
            return pipeline.read(
                self.model, micro_batches, reader, self.parallel, temperature=temperature, routing=routing or self.router_pass()
            )

    def whole(self, batch: MicroBatch, local: LocalBatch, values: torch.Tensor) -> np.ndarray:
        """[c] on each context-parallel rank -> [C] on all of them."""
        whole = torch.zeros(len(batch.targets), device=self.parallel.device)
        whole[torch.from_numpy(local.trained).to(whole.device)] = values.detach().float()
        return collectives.add_(whole, self.parallel.cp_group).cpu().numpy()
