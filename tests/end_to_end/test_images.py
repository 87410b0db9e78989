"""A run on rows with images whose vision tower trains, killed and resumed: equal to the undisturbed run bit for bit."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.runs import REWARD, read_jsonl
from tests.ranks import RanksFailed, run_ranks
from tests.seeing import as_bytes, picture, write_seeing

STEPS = 4
EXACT = ("loss", "reward", "grad_norm", "num_tokens", "staleness/mean", "learning_rate", "sampling/sampling_logp_difference/max")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Rollouts of 12 rows and steps of 8: at every second checkpoint rows are pending, whose images are loaded again."""
    folder = tmp_path_factory.mktemp("pictures")
    write_seeing(folder / "model")
    rows = []
    for number in range(7):
        names = [f"{number}.{i}.png" for i in range(number % 3)]
        for i, name in enumerate(names):
            (folder / name).write_bytes(as_bytes(picture(50 + 9 * number, 60 + 20 * i, seed=10 * number + i)))
        rows.append({"messages": [{"role": "user", "content": "<image>" * len(names) + f"How many {number}?"}], "images": names})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return [
        *("--model", str(folder / "model")), *("--dataset", str(folder / "data.jsonl")), *("--reward_funcs", f"{folder}/reward.py:even"),
        *("--torch_dtype", "float32"), *("--num_generations", "4"), *("--global_batch_size", "8"), *("--generation_batch_size", "12"),
        *("--allow_unaligned_generation", "true"), *("--micro_batch_size", "2"), *("--max_completion_length", "8"), *("--lr", "1e-3"),
        *("--freeze_vit", "false"), *("--freeze_aligner", "false"), *("--max_steps", str(STEPS)), *("--save_steps", "1"),
        *("--rank_heartbeat_timeout", "0"), *("--verify_weight_sync", "false"),
    ]  # fmt: skip


def train(rank, world_size, flags, killed_after=None):
    """Run `megatron-grpo train` with completions that depend on the prompt only, each token sampled among three.

    The log-probs are those of the initial model.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    from megatron_grpo.cli import main
    from megatron_grpo.core.arrays import SamplingMask
    from megatron_grpo.core.rollout.engine import make_completion
    from megatron_grpo.core.types import TokenSequence
    from tests.scripted_engine import ScriptedEngine
    from tests.vision_cases import compute_logits

    model = AutoModelForImageTextToText.from_pretrained(flags[flags.index("--model") + 1], dtype="float32").eval()
    out = Path(flags[flags.index("--output_dir") + 1])

    def answer(prompt, place, version):
        drawn = np.random.default_rng([prompt.number, place]).integers(4, 250, 1 + (prompt.number + place) % 8)
        ids = np.array([*prompt.token_ids, *drawn])
        images = TokenSequence(token_ids=ids, mask=np.arange(len(ids)) >= len(prompt.token_ids), images=prompt.images)
        words = np.stack([drawn, drawn + 1, drawn + 5], axis=1)
        with torch.no_grad():
            few = compute_logits(model, images).float()[-1 - len(drawn) : -1].gather(1, torch.from_numpy(words))
        kept = SamplingMask(3 * np.arange(len(drawn) + 1), words.ravel().astype(np.int32))
        return make_completion(prompt.token_ids, drawn.tolist(), few.log_softmax(-1)[:, 0].tolist(), text=str(drawn), finish_reason="stop",
                        version=version, sampling_mask=kept, images=prompt.images)  # fmt: skip

    def kill():
        while not (out / "metrics.jsonl").exists() or len(read_jsonl(out / "metrics.jsonl")) < killed_after:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and killed_after is not None:
        threading.Thread(target=kill, daemon=True).start()
    return main(["train", *flags], engine=lambda cfg, inputs, parallel: ScriptedEngine(answer))


def test_image_run_killed_resumes_exactly(flags, tmp_path):
    """Mutation: a pending row loses its images in a checkpoint (`restore` in checkpoint/saving.py)."""
    assert run_ranks(train, 2, [*flags, "--output_dir", str(tmp_path / "whole")], timeout=180) == [0, 0]
    flags = [*flags, "--output_dir", str(tmp_path / "out")]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train, 2, flags, 2, timeout=180)
    done = len(read_jsonl(tmp_path / "out" / "metrics.jsonl"))
    assert run_ranks(train, 2, flags, timeout=180) == [0, 0]
    assert 2 <= done < STEPS
    assert read_jsonl(tmp_path / "whole" / "metrics.jsonl")[0]["sampling/sampling_logp_difference/max"] < 1e-4, (
        "over the words that were left"
    )

    whole_sequence, found = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "out"))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [[line.get(name) for name in EXACT] for line in found] == [[line.get(name) for name in EXACT] for line in whole_sequence]
    one, other = ((tmp_path / name / "hf" / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == other
