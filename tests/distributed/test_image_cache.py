"""A checkpoint stores prompt indices instead of images; a resumed run loads the images again."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.distributed.test_checkpoint import PendingRows, SmallPolicy, make_checkpoint_manager, make_pending_samples
from tests.ranks import run_ranks
from tests.seeing import as_bytes, picture
from tests.unit.data.test_images import EYES, SmallTokenizer, make_image_row


def test_resume_restores_images_of_pending_rows(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(as_bytes(picture(56 + 28 * number, 60, seed=number)))
    rows = [make_image_row(*[f"{number}.png"] * (1 + number % 2), text="<image>" * (1 + number % 2)) for number in range(5)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def body(rank, world_size):
        from megatron_grpo.core.metadata import Progress
        from megatron_grpo.run.config.settings import DataConfig
        from megatron_grpo.run.data.prompts import open_stream

        def stream():
            return open_stream(DataConfig(dataset=str(tmp_path / "d.jsonl")), SmallTokenizer(), seed=3, image_spec=EYES)

        def described(samples):
            return [[(place, one.key, one.grid) for place, one in sample.images] for sample in samples]

        drawn = stream()
        prompts = drawn.take(13)
        samples = [
            replace(sample, prompt_number=number, images=prompts[number].images)
            for sample, number in zip(make_pending_samples(), (2, 11, 7), strict=True)
        ]
        policy, keeper = SmallPolicy(1), make_checkpoint_manager(tmp_path / "run")
        keeper.save(Progress(step=1, num_rollouts=1, num_prompts=13, num_tokens=1), PendingRows(samples), policy, drawn)
        keeper.finish()
        again, fresh = make_checkpoint_manager(tmp_path / "run"), stream()
        again.choose()
        _, waiting = again.restore(policy, fresh, PendingRows())
        assert fresh.taken == 13
        return described(samples), described(waiting.samples)

    [(before, after)] = run_ranks(body, 1)
    assert before == after and all(before)
