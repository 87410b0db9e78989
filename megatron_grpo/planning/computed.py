"""What the passes over one optimizer step compute: packed as training packs, with each prompt once and with one for every completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.planning.facts import bubble_fraction
from megatron_grpo.planning.lengths import Lengths, cut_of, extents_of, sequence_tokens
from megatron_grpo.planning.sharing import Sharing

if TYPE_CHECKING:
    from megatron_grpo.batching.alignment import Alignment
    from megatron_grpo.batching.split import BatchCut, Portion
    from megatron_grpo.types import Extent

MOST_ROWS = 65_536  # of an optimizer step whose packing is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Over all ranks, in one forward, of so many sequences."""

    sequences: int
    tokens: int  # in the streams, alignment included
    squares: int  # of attention: twice its pairs of a query and a key, which makes T^2 of a sequence of T tokens
    lengths: Mapping[int, int]  # sequences by their tokens
    scored: int  # places of the output layer
    pieces: int
    micro_batches: int
    largest: int  # tokens of the fullest stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step, or the first MOST_ROWS rows of a larger one. `shared` is as the run does it: `apart`, if nothing is shared."""

    sizes: BatchSizes
    cut: BatchCut
    pairs: Sequence[tuple[int, int]]  # (prompt, completion) tokens of its rows
    extents: Sequence[Extent]
    apart: Computed
    shared: Computed

    @classmethod
    def of(cls, sharing: Sharing, sizes: BatchSizes, cfg: Config, lengths: Lengths | None) -> Step:
        """A file of fewer rows than a step is taken again from its first line; without a file, all sequences are as long as may be."""
        cut = cut_of(sizes, cfg, sharing.least_saving)
        unit = cut.rows_per_slice * cut.multiple
        most = min(sizes.global_batch_size, max(MOST_ROWS // unit, 1) * unit)
        given = lengths.pairs if lengths else [sequence_tokens(cfg, None, longest=True)]
        pairs = [given[i % len(given)] for i in range(most)]
        extents = extents_of(pairs, sizes.num_generations)
        apart = packed(pairs, extents, replace(cut, least_saving=None))
        shared = packed(pairs, extents, cut) if sharing.least_saving is not None else apart
        return cls(sizes=sizes, cut=cut, pairs=pairs, extents=extents, apart=apart, shared=shared)

    def with_budget(self, max_tokens: int, least_saving: float) -> Computed:
        """The same rows under another token budget, prompts shared."""
        # A budget beyond all rows together changes nothing, and packing needs room for every length up to it.
        max_tokens = min(max_tokens, self.cut.alignment.of_stream(self.apart.tokens))
        return packed(self.pairs, self.extents, replace(self.cut, max_tokens=max_tokens, least_saving=least_saving))

    def micro_batches_of_rank(self, computed: Computed) -> int:
        """Of the whole step, where only its first rows were packed too."""
        return -(-computed.micro_batches * self.sizes.global_batch_size // (computed.sequences * self.sizes.dp_size))

    def bubble(self, computed: Computed) -> float:
        return bubble_fraction(self.sizes, self.micro_batches_of_rank(computed))


def packed(pairs: Sequence[tuple[int, int]], extents: Sequence[Extent], cut: BatchCut) -> Computed:
    """Rows that do not come out even are filled up with the first one again, as in passes that train nothing."""
    from megatron_grpo.batching.split import deal_filled  # numpy, which other plans do without

    portions = [portion for mine in deal_filled(extents, cut) for portion in mine]
    rows = [i if i < len(pairs) else 0 for portion in portions for i in portion.rows]
    return Computed(
        sequences=len(rows),
        tokens=sum(portion.num_tokens for portion in portions),
        squares=sum((sum(pairs[i]) - 1) ** 2 for i in rows) - sum(_squares_saved(portion, extents, cut.alignment) for portion in portions),
        lengths=Counter(sum(pairs[i]) - 1 for i in rows),
        scored=sum(min(pairs[i][1], sum(pairs[i]) - 1) for i in rows),
        pieces=sum(len({extents[i if i < len(extents) else 0].group for i in portion.rows}) for portion in portions),
        micro_batches=len(portions),
        largest=max(portion.num_tokens for portion in portions),
    )


def _squares_saved(portion: Portion, extents: Sequence[Extent], alignment: Alignment) -> int:
    """A child attends to all of its trunk: P^2 + sum (2 P t + t^2) is sum (P + t)^2 less P^2 for every copy of the trunk but one."""
    from megatron_grpo.batching.families import num_tokens

    saved = 0
    for family in portion.families:
        if len(family.members) > 1 and family.prefix:
            members = [extents[i if i < len(extents) else 0] for i in (portion.rows[place] for place in family.members)]
            computed = [extent.contexts[0] - 1 for extent in members]
            if num_tokens(computed, family.prefix, alignment) < num_tokens(computed, 0, alignment):
                saved += (len(members) - 1) * family.prefix**2
    return saved
