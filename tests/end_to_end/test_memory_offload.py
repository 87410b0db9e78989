"""Complete runs with offload for the sampler: files equal those without it, and the memory is free while the engine samples.

With a real engine, and stopped by a signal: tests/end_to_end/test_resume.py.
"""

from __future__ import annotations

from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks

OFFLOAD = ["--offload_model", "true", "--offload_optimizer", "true"]
TOLD = ("loss", "reward", "grad_norm", "kl", "staleness/mean", "num_tokens")


def train_and_watch(rank, world_size, flags):
    """Return the exit code, the bytes that the policy held while the engine sampled, and the bytes of the files of checkpoint 2.

    With `async_save` the checkpoint's tensors are written only after the engine has sampled once more.
    """
    import time

    from megatron_grpo.run.assemble import run as build
    from megatron_grpo.run.checkpoint import distributed
    from tests.end_to_end import scripted
    from tests.scripted_engine import ScriptedEngine

    real_policy, real_answer, real_write, policies, held = build.build_policy, ScriptedEngine.generate, distributed.write_pieces, [], []
    files = {}

    def build_policy(*args, **kwargs):
        policies.append(real_policy(*args, **kwargs))
        return policies[-1]

    def generate(self, *args, **kwargs):
        held.append(sum(storage.nbytes() for its in policies[-1].offloader._storages().values() for storage in its))
        return real_answer(self, *args, **kwargs)

    def write_pieces(path, pieces):
        end = time.monotonic() + 60
        while "--async_save" in flags and len(held) < 3:  # an evaluation, the rollout before the save, and the one behind it
            assert time.monotonic() < end, "nothing was sampled while a checkpoint was under way"
            time.sleep(0.01)
        written = real_write(path, pieces)
        files.setdefault(path.name, path.read_bytes())
        return written

    build.build_policy, ScriptedEngine.generate, distributed.write_pieces = build_policy, generate, write_pieces
    return scripted.train(rank, world_size, flags), held, files


def test_offloaded_and_resumed_run_equals_run_without_offload(tmp_path):
    small = dict(layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=32)
    flags = [*write_inputs(tmp_path, rows=12, **small), *("--num_generations", "2"), *("--global_batch_size", "8"), "--log_entropy", "true"]
    flags += ["--steps_per_generation", "2", "--beta", "0.1", "--kl_in_reward", "true", "--eval_dataset", str(tmp_path / "data.jsonl")]
    flags += ["--eval_num_prompts", "2", "--save_steps", "2", "--log_completions_steps", "0", "--torch_dtype", "bfloat16"]
    plain, away = ["--output_dir", str(tmp_path / "plain")], [*OFFLOAD, "--output_dir", str(tmp_path / "away")]
    beside = [*away, "--async_save", "true"]  # of step 2, while the policy is away for the second rollout
    runs = [[*flags, *plain, "--max_steps", "4"], [*flags, *beside, "--max_steps", "3"], [*flags, *away, "--max_steps", "4"]]
    found = [run_ranks(train_and_watch, 1, run, timeout=120)[0] for run in runs]
    assert [code for code, _, _ in found] == [0, 0, 0]
    assert all(held > 0 for held in found[0][1]), "the policy was there all the time"
    assert [set(held) for _, held, _ in found[1:]] == [{0}, {0}] and [len(held) for _, held, _ in found] == [4, 4, 1]
    assert found[0][2] and found[0][2] == found[1][2], "what is written while the policy is away is not what it was"
    one, other = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("plain", "away"))
    assert [{name: step.get(name) for name in TOLD} for step in one] == [{name: step.get(name) for name in TOLD} for step in other]
    evaluations = [read_jsonl(tmp_path / name / "evaluations.jsonl") for name in ("plain", "away")]
    assert [line["step"] for line in evaluations[0]] == [0, 4] and evaluations[0][0]["even"] == evaluations[1][0]["even"]
    for file in (tmp_path / "plain" / "hf").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "away" / "hf" / file.name).read_bytes()
    assert [step["step"] for step in other if step.get("time/offload", 0) > 0] == [1, 3], "the second step of a rollout moves nothing"
    assert all(step["memory/offloaded_gb"] > 0 for step in other)
    assert not any("time/offload" in step or "memory/offloaded_gb" in step for step in one)
