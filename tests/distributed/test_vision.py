"""Vision-language models against transformers in float64: log-probs, gradients of language model, aligner and tower, exports, syncs.

A few layouts of each family; `tools/vision_parity.py` runs all. Each silent mutation is applied once.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from megatron_grpo.core.weights.vision_towers import find_part
from megatron_grpo.run.checkpoint.distributed import read_sharded
from tests import parity_cases as cases
from tests import vision_cases as vision
from tests.checkpoint_files import write_sharded
from tests.ranks import RanksFailed, run_ranks

# (family, layout, settings): together every layout that is a way of its own to hold, cut or sum what pictures are.
CASES = [
    ("qwen2_5_vl", "1", dict(share_prefix="true", max_tokens_per_micro_batch=96)),
    ("qwen3_vl", "TP2 SP", {}),
    ("qwen2_vl", "PP2 VPP2", {}),
    ("qwen3_vl", "CP2", dict(share_prefix="true")),
    ("qwen3_5", "CP2", dict(share_prefix="true")),
    ("qwen3_5_moe", "TP2 SP", {}),
    ("qwen3_vl_moe", "TP2 SP", dict(share_prefix="true")),
    ("qwen3_vl_moe", "CP2", {}),
    ("qwen3_vl_moe", "EP2", {}),
    ("qwen2_5_vl", "DP2", dict(vit_lr=4e-3, aligner_lr=1e-3)),
]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# family -> (layout, settings). All linear layers; beside experts in one tensor those of attention.
WITH_ADAPTERS = {
    "qwen2_5_vl": ("TP2 SP", {}),
    "qwen3_5": ("TP2 SP", {}),
    "qwen3_5_moe": ("EP2", {}),
    "qwen3_vl_moe": ("EP2", {"target_modules": ATTENTION}),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return family -> (checkpoint, two global batches, transformers' log-probs of the first in float64)."""

    @functools.cache
    def prepare(family: str):
        path = vision.write_vlm(tmp_path_factory.mktemp(family), family)
        batches = vision.rollout(path, num_steps=2)
        return path, batches, vision.logprobs_in_float64(path, batches[0])

    return prepare


@functools.cache
def reference(path, **changes):
    """Return transformers' two steps on the rollout of a checkpoint."""
    return cases.reference(path, vision.settings(path, vision.ALL_TRAINS | changes), vision.rollout(path, num_steps=2))


@pytest.mark.parametrize(("family", "layout", "changes"), CASES, ids=[f"{family}, {layout}" for family, layout, _ in CASES])
def test_vision_logprobs_gradients_and_exports_equal_transformers(prepared, family, layout, changes):
    path, batches, logprobs = prepared(family)
    rates = {name: value for name, value in changes.items() if name.endswith("_lr")}
    where = vision.LAYOUTS[layout]
    cfg = vision.settings(path, vision.ALL_TRAINS | changes, where.settings)
    for scored, trained in run_ranks(vision.score_and_train, where.world_size, path, cfg, batches):
        assert vision.far(scored, logprobs) < 1e-5
        found = cases.distance(trained, reference(path, **rates))
        assert found.within(), found


def test_vision_frozen_parts_stay_and_others_equal_transformers(prepared):
    """Aligner and tower train through a frozen language model."""
    path, batches, logprobs = prepared("qwen2_5_vl")
    ways = {way: vision.WAYS[way] for way in ("tower alone", "aligner alone", "frozen, reference")}
    where = vision.LAYOUTS["TP2 SP"]
    references = {way: cases.reference(path, vision.settings(path, chosen), batches) for way, chosen in ways.items()}
    for found in run_ranks(vision.all_ways, where.world_size, path, where.settings, ways, batches, timeout=180):
        for way, (scored, trained) in found.items():
            assert vision.far(scored, logprobs) < 1e-5
            assert cases.distance(trained, references[way]).within(), way


@pytest.mark.parametrize("family", WITH_ADAPTERS)
def test_vision_lora_steps_equal_peft(prepared, family):
    layout, changes = WITH_ADAPTERS[family]
    path, batches, logprobs = prepared(family)
    where, way = vision.LAYOUTS[layout], vision.WAYS["LoRA"] | changes
    right = cases.reference(path, vision.settings(path, way), batches)
    cfg = vision.settings(path, way, where.settings)
    for scored, trained in run_ranks(vision.score_and_train, where.world_size, path, cfg, batches, timeout=180):
        assert vision.far(scored, logprobs) < 1e-5
        # Adapters begin at zero, so what two steps have made of them has the relative error of a step, which Adam divides by its size.
        assert cases.distance(trained, right).within(weight=1e-4), cases.distance(trained, right)


# ---- what leaves no error: each is set here, and must be seen


def drop_marks(policy):
    for chunk in policy.chunks:
        for parameter in chunk.vision.tower.parameters():
            parameter.sequence_parallel = False


def split_axes_in_blocks(policy):
    blocks = [axis for axis, count in enumerate(policy.exchange.map.shape.rope.sections) for _ in range(count)]
    for chunk in policy.chunks:
        chunk.axes = torch.tensor(blocks)


def cast_rotary_buffers(policy):
    for chunk in policy.chunks:
        for buffer in chunk.vision.tower.buffers():
            buffer.copy_(buffer.bfloat16())


def reverse_deepstack(policy):
    for chunk in policy.chunks:
        chunk.vision._encode = lambda pictures, encode=chunk.vision._encode: (lambda first, *deep: [first, *deep[::-1]])(*encode(pictures))


def use_plain_positions(_):
    from megatron_grpo.core.batching import collate

    collate.positions = lambda length, images: np.tile(np.arange(length), (3, 1))


def find_positions_by_token(_):
    """Mutation: take the first image tokens as the image's positions, equally many; a sampled image token may be among them."""
    from megatron_grpo.core.batching import collate

    right = collate.image_tokens

    def seen(sequences, contexts, in_stream):
        found = right(sequences, contexts, in_stream)
        if not found.images:
            return found
        drawn = [
            in_stream(c, np.flatnonzero(sequences[c.row].token_ids[c.first : c.first + c.num_computed] == vision.IMAGE)) for c in contexts
        ]
        at = np.unique(np.concatenate(drawn))
        return found._replace(at=at, token=np.arange(len(at)) % (found.token.max() + 1))

    collate.image_tokens = seen


def embed_per_child(_):
    """Mutation: embed a trunk's images once per context."""
    from megatron_grpo.core.batching import collate

    right = collate.image_tokens
    collate.image_tokens = lambda *args: (lambda found: found._replace(at=np.tile(found.at, 2), token=np.tile(found.token, 2)))(
        right(*args)
    )


MUTATIONS = {
    "no mark": (drop_marks, {}),
    "axes in blocks": (split_axes_in_blocks, {}),
    "rotary buffers cast": (cast_rotary_buffers, {}),
    "deepstack backwards": (reverse_deepstack, {}),
    "plain positions": (use_plain_positions, {}),
    "places from ids": (find_positions_by_token, {}),
    "a picture for each child": (embed_per_child, dict(share_prefix="true")),
}


def apply_mutation(rank, world, path, layout, batches):
    from megatron_grpo.core.batching import collate

    parallel = cases.join(vision.settings(path, {}, layout), world)
    positions, seen, found = collate.positions, collate.image_tokens, {}
    for name, (mutate, chosen) in MUTATIONS.items():
        cfg = vision.settings(path, vision.ALL_TRAINS | chosen, layout)
        found[name] = vision.score_and_train(rank, world, path, cfg, batches, parallel, tamper=mutate)
        collate.positions, collate.image_tokens = positions, seen
    return found


def test_vision_silent_mutation_is_detected(prepared):
    path, (first, _), logprobs = prepared("qwen3_vl")
    where = vision.LAYOUTS["TP2 SP"]
    right = cases.reference(path, vision.settings(path, vision.ALL_TRAINS), [first])  # one step is enough: gradients are compared
    found = run_ranks(apply_mutation, where.world_size, path, where.settings, [first], timeout=180)[0]
    far = {name: vision.far(scored, logprobs) for name, (scored, _) in found.items()}
    for name, (_, trained) in found.items():
        assert not cases.distance(trained, right).within(), name
        # Of these log-probs say nothing: only the gradient of the tower is another.
        assert (far[name] < 1e-5) == (name in ("no mark", "a picture for each child")), (name, far[name])


def test_vision_overlapped_reduction_works_without_images_in_micro_batch(tmp_path):
    """Of two ranks with one row per micro-batch, the second has no image in the first micro-step, and then neither has."""
    path = vision.write_vlm(tmp_path, "qwen2_vl")
    batches = vision.rollout(path, groups=vision.APART, num_steps=2)
    cfg = vision.settings(path, vision.WAYS["overlapped"])
    right = cases.reference(path, cfg, batches)
    for _, trained in run_ranks(vision.score_and_train, 2, path, cfg, batches):
        assert cases.distance(trained, right).within()

    def untouched(policy):
        for chunk in policy.chunks:
            chunk.vision._touched = lambda hidden: hidden

    with pytest.raises(RanksFailed, match="per_param_grad_ready_counts|Communication call has not been issued"):
        run_ranks(lambda rank, world: vision.score_and_train(rank, world, path, cfg, batches, tamper=untouched), 2)


def test_vision_resume_is_exact_in_same_and_other_layout(prepared, tmp_path):
    path, batches, _ = prepared("qwen3_vl")

    def settings(layout):
        return vision.settings(path, vision.ALL_TRAINS | dict(share_prefix="true"), vision.LAYOUTS[layout].settings)

    def weights(policy):
        return {name: tensor.numpy().copy() for name, tensor in policy.named_weights()}

    def begin(rank, world):
        policy = cases.build(path, settings("TP2 SP"), world)
        policy.train_step(cases.make_batch(policy, batches[0], 0))
        write_sharded(policy.sharded_state_dict(is_loading=False), tmp_path)
        policy.train_step(cases.make_batch(policy, batches[1], 1))
        return weights(policy)

    def go_on(rank, world, layout):
        policy = cases.build(path, settings(layout), world)
        policy.load_sharded_state_dict(read_sharded(policy.sharded_state_dict(is_loading=True), tmp_path))
        policy.train_step(cases.make_batch(policy, batches[1], 1))
        return weights(policy)

    whole = run_ranks(begin, 2)[0]
    again, elsewhere = run_ranks(go_on, 2, "TP2 SP")[0], run_ranks(go_on, 2, "CP2")[0]
    assert all(np.array_equal(again[name], whole[name]) for name in whole)
    assert max(cases.relative_error(elsewhere[name], whole[name]) for name in whole) < 1e-5


def test_vision_sync_leaves_out_frozen_tower_and_logs_it(prepared):
    """After the sampler has lost its weights, all of them are synced."""
    path, _, _ = prepared("qwen2_5_vl")

    def pushes(rank, world):
        found, parallel = {}, cases.join(vision.settings(path, {}, vision.LAYOUTS["PP2"].settings), world)
        for way in ("tower frozen", "aligner alone"):
            policy = cases.build(path, vision.settings(path, vision.WAYS[way], vision.LAYOUTS["PP2"].settings), world, parallel)
            for has_base in (True, False):
                (update,) = policy.updates(3, has_base=has_base)
                found[way, has_base] = update.moves_tower, {find_part(name) for name, _ in update.tensors}
        return found

    whole = True, {"llm", "vit", "aligner"}
    for found in run_ranks(pushes, 2):
        assert found == {
            ("tower frozen", True): (False, {"llm"}),
            ("tower frozen", False): whole,
            ("aligner alone", True): whole,
            ("aligner alone", False): whole,
        }


def test_vision_frozen_tower_outputs_are_cached_and_offloaded(prepared):
    path, batches, _ = prepared("qwen2_5_vl")

    def encoded(rank, world):
        policy = cases.build(path, vision.settings(path, {}), world)
        (chunk,) = policy.chunks
        encode, found = chunk.vision._encode, []
        chunk.vision._encode = lambda pictures: found.append([one.key for one in pictures]) or encode(pictures)
        first = policy.scorer.score(batches[0])
        assert sorted(found) == [["a"], ["b"], ["c"]], "each once, and by itself"
        again = policy.scorer.score(batches[0])
        assert len(found) == 3 and all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        policy.free_memory()
        policy.scorer.score(batches[0])
        assert len(found) == 6

    run_ranks(encoded, 1)


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_vision_frozen_tower_has_no_backward(prepared, family):
    from megatron_grpo.core.policy.vision import build_tower
    from megatron_grpo.core.weights.shape import ModelShape

    path, batches, _ = prepared(family)
    tower = build_tower(ModelShape.from_pretrained(path), path, dtype=torch.float32, device="cpu").train()
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(find_part(f"visual.{name}") == "aligner")
    asks = {}
    for block in tower.blocks:
        block.register_forward_hook(lambda block, args, output: asks.update({id(block): output.requires_grad}))
    ((_, picture),) = batches[0][0].images
    found = tower(torch.from_numpy(picture.patches()), grid_thw=torch.tensor([picture.grid]))
    assert found.pooler_output.requires_grad and not any(asks.values()) and len(asks) == 3


def test_vision_rotary_frequencies_stay_float32(prepared):
    from megatron_grpo.core.policy.vision import build_tower
    from megatron_grpo.core.weights.shape import ModelShape

    path, _, _ = prepared("qwen2_5_vl")
    shape = ModelShape.from_pretrained(path)
    coarse, exact = (build_tower(shape, path, dtype=dtype, device="cpu") for dtype in (torch.bfloat16, torch.float32))
    assert all(parameter.dtype is torch.bfloat16 for parameter in coarse.parameters())
    buffers = list(exact.buffers())
    assert buffers and all(torch.equal(a, b) for a, b in zip(coarse.buffers(), buffers, strict=True))
