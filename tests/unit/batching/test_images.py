"""Positions of images in a packed stream, and M-RoPE positions against transformers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_grpo.core.batching.collate import collate, compute_grid, positions
from megatron_grpo.core.batching.prefix_groups import Alignment, PrefixGroup
from megatron_grpo.core.types import TokenSequence
from tests.vision_cases import IMAGE, picture

WIDE = picture("wide", 4, 6)  # 2 x 3 tokens
FLAT = picture("flat", 2, 8)  # 1 x 4 tokens


def make_row(*parts, scored: int = 2) -> TokenSequence:
    """parts: numbers of words, or pictures."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += range(4 + len(tokens), 4 + len(tokens) + part)
        else:
            images.append((len(tokens), part))
            tokens += [IMAGE] * part.num_tokens
    ids = np.array(tokens, dtype=np.int64)
    return TokenSequence(token_ids=ids, mask=np.arange(len(ids)) >= len(ids) - scored, images=tuple(images))


def test_mrope_positions_of_image_form_grid_and_text_continues_after_longer_side():
    found = positions(12, ((2, WIDE),))
    assert found[:, :2].tolist() == [[0, 1]] * 3
    assert found[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert found[:, 8:].tolist() == [[5, 6, 7, 8]] * 3


def test_mrope_positions_of_second_image_start_after_preceding_text():
    found = positions(14, ((1, FLAT), (6, WIDE)))
    assert found[:, 1:5].tolist() == [[1] * 4, [1] * 4, [1, 2, 3, 4]]
    assert found[:, 5].tolist() == [5] * 3  # 1 + the longer side
    assert found[:, 6:12].tolist() == [[6] * 6, [6, 6, 6, 7, 7, 7], [6, 7, 8, 6, 7, 8]]
    assert found[:, 12:].tolist() == [[9, 10]] * 3


def test_positions_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    config = AutoConfig.for_model("qwen2_5_vl", image_token_id=IMAGE, text_config={}, vision_config={})
    model = SimpleNamespace(config=config)  # the class holds weights of 7 B: only its arithmetic is asked for
    model.get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids.__get__(model)
    one = make_row(3, WIDE, 2, FLAT, 1, picture("tall", 8, 2), 4)
    is_picture = np.zeros(len(one.token_ids), dtype=np.int64)
    for place, images in one.images:
        is_picture[place : place + images.num_tokens] = 1
    found, _ = Qwen2_5_VLModel.get_rope_index(
        model, torch.from_numpy(one.token_ids)[None], mm_token_type_ids=torch.from_numpy(is_picture)[None].int(),
        image_grid_thw=torch.tensor([images.grid for _, images in one.images]),
    )  # fmt: skip
    assert np.array_equal(found[:, 0].numpy(), positions(len(one.token_ids), one.images))


def test_positions_without_images_have_one_axis():
    assert collate([make_row(5), make_row(7)]).positions.shape == (10,)
    assert collate([make_row(5), make_row(2, WIDE, 3)]).positions.shape == (3, 14)


def test_image_positions_ignore_sampled_placeholder_tokens():
    one = make_row(2, WIDE, 4)
    one.token_ids[-2] = IMAGE
    micro = collate([one])
    assert micro.image_positions.tolist() == [2, 3, 4, 5, 6, 7] and micro.image_token_index.tolist() == list(range(6))
    assert (micro.token_ids == IMAGE).sum() == 7


def test_collate_encodes_an_image_once_for_several_rows():
    micro = collate([make_row(2, WIDE, 3), make_row(1, FLAT, 3), make_row(4, WIDE, FLAT, 2)])
    assert [one.key for one in micro.images] == ["wide", "flat"]
    for place, token in zip(micro.image_positions, micro.image_token_index, strict=True):
        assert micro.token_ids[place] == IMAGE and token < 10
    assert np.bincount(micro.image_token_index).tolist() == [2] * 10


def test_shared_prefix_images_enter_once_with_positions_as_without_sharing():
    first, second = make_row(3, WIDE, 2, FLAT, 6), make_row(3, WIDE, 2, FLAT, 9)
    second.token_ids[-5:] += 50
    prefix_group = PrefixGroup(members=(0, 1), prefix=15, min_saving_ratio=0.0)
    shared, apart = collate([first, second], prefix_groups=[prefix_group]), collate([first, second])
    assert len(shared.image_positions) == 10 and len(np.unique(shared.image_positions)) == 10
    assert len(apart.image_positions) == 20
    for micro in (shared, apart):
        begin = 0
        for one in (first, second):
            places = micro.places[begin : begin + len(one.token_ids) - 1]
            assert np.array_equal(micro.positions[:, places], positions(len(one.token_ids) - 1, one.images))
            begin += len(one.token_ids)


def test_padding_continues_positions_without_images():
    micro = collate([make_row(2, WIDE, 4), make_row(3)], alignment=Alignment(sequence=8, stream=32))
    assert micro.positions.shape == (3, 32) and micro.positions.min() >= 0
    assert not micro.is_padding[micro.image_positions].any()


def test_shared_prefix_may_end_within_an_image():
    first, second = make_row(3, WIDE, 4), make_row(3, WIDE, 4)
    second.token_ids[-3:] += 50
    micro = collate([first, second], prefix_groups=[PrefixGroup(members=(0, 1), prefix=6, min_saving_ratio=0.99)])
    assert micro.segments[0].length in (6, 9, 10)
    for number, one in enumerate((first, second)):
        begin = number * len(first.token_ids)
        places = micro.places[begin : begin + len(one.token_ids) - 1]
        assert np.array_equal(micro.token_ids[places], one.token_ids[:-1])
        assert set(places[3:9]) <= set(micro.image_positions.tolist())


@pytest.mark.parametrize("grid", [(2, 4, 4), (1, 3, 4), (1, 4, 5)])
def test_image_grid_of_several_frames_or_partial_tokens_is_rejected(grid):
    with pytest.raises(ValueError, match="a grid must be one frame, a multiple of 2 x 2"):
        compute_grid(dataclasses.replace(WIDE, grid=grid))
