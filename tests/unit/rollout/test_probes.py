"""Probe sequences of vision-language models: some contain an image even if sequences are short, because only those reveal a stale vision
tower."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from megatron_grpo.core.images import ORIENTATION, decode_image
from megatron_grpo.core.rollout.probes import probe_sequences
from tests.unit.data.test_images import EYES


class SmallTokenizer:
    all_special_ids = (0,)

    def __len__(self):
        return 64


@pytest.mark.parametrize(("longest", "num_showing"), [(400, 2), (26, 2), (13, 2), (11, 1), (9, 0)])
def test_probe_sequences_include_images_that_fit(longest, num_showing):
    probes = probe_sequences(SmallTokenizer(), vocab_size=60, max_model_len=longest, image_spec=EYES)
    assert len(probes) == 4 and sum(bool(one.images) for one in probes) == num_showing
    for probe in probes:
        assert len(probe.token_ids) < longest
        at = np.flatnonzero(probe.token_ids == EYES.image_token)
        images = [place + i for place, picture in probe.images for i in range(picture.num_tokens)]
        assert at.tolist() == images and (not images or images[-1] < len(probe.token_ids) - 2)
    text = probe_sequences(SmallTokenizer(), vocab_size=60, max_model_len=longest)
    assert not any(one.images for one in text)


def test_probe_sequences_include_image_with_exif_orientation():
    shown = [one.images[0][1] for one in probe_sequences(SmallTokenizer(), vocab_size=60, max_model_len=400, image_spec=EYES)[:2]]
    assert [Image.open(io.BytesIO(one.data())).getexif().get(ORIENTATION, 1) for one in shown] == [6, 1]
    for one in shown:
        image = decode_image(one.data())
        assert (image.height, image.width) == (one.height, one.width) and len(one.patches()) == np.prod(one.grid)
    straight = dataclasses.replace(shown[0], is_turned=False)
    assert np.array_equal(shown[0].patches(), straight.patches()) and shown[0].key != straight.key


def test_probe_image_is_deterministic():
    one, other = (probe_sequences(SmallTokenizer(), vocab_size=60, max_model_len=400, image_spec=EYES)[0].images[0][1] for _ in range(2))
    assert one.key == other.key and np.array_equal(one.patches(), other.patches()) and len(one.patches()) == np.prod(one.grid)
