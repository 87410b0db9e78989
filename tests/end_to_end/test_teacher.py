"""On-policy distillation with a teacher of another size, on a real server that accepts no weights or on the training ranks."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo.plugins.servers import wire
from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, train, write_inputs
from tests.end_to_end.test_async_rollouts import AHEAD, CORRECTED
from tests.end_to_end.test_compare_losses import compare_losses
from tests.end_to_end.test_many_steps import LORA
from tests.ranks import run_ranks
from tests.servers import ASKS, Server, ServerAnswerError
from tests.step_dump_cases import replayed
from tests.tiny_models import hf_logprobs, load_tiny, write_tiny

STEPS = 16
WIDTH, LIKING = 96, 1.5

ROUTE = "/prompt_logprobs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("teacher")


def favor_even_tokens(path):
    """Raise the logits of even token IDs of a model, so that a student learns it from few noisy samples."""
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"] += 1.0  # a part that all hidden states have, and the head answers to
    weights["lm_head.weight"][0::2] += LIKING / WIDTH
    weights["lm_head.weight"][1::2] -= LIKING / WIDTH
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def teacher(folder):
    """(server, directory) of a teacher with three layers, wider than the student, which has two."""
    path = favor_even_tokens(write_tiny(folder / "large", hidden=WIDTH, layers=3, ffn=160, seed=1, std=0.05))
    server = Server(folder / "server", path, "--frozen", "true", "--vllm_max_model_len", "64")
    try:
        yield server.wait(), path
    finally:
        server.close()


def test_teacher_server_scores_equal_transformers_and_rejects_other_requests(teacher):
    server, path = teacher
    model = load_tiny(path)
    rng = np.random.default_rng(3)
    sequences = tuple(tuple(rng.integers(4, 128, length).tolist()) for length in (2, 9, 40, 63))
    first = (1, 4, 12, 1)
    body = wire.PromptLogprobsRequest(sequences=sequences, first=first)
    for _ in range(2):  # the second time the prefix cache holds all of them
        lines = server.call(ROUTE, body).splitlines(keepends=True)
        found = {one.place: one.logprobs for line in lines if (one := wire.decode_line(wire.LogprobsLine, line))}
        assert found.keys() == {0, 1, 2, 3}
        for place, (ids, begin) in enumerate(zip(sequences, first, strict=True)):
            expected = hf_logprobs(model, list(ids))[begin - 1 :].numpy()
            assert found[place].shape == expected.shape and np.abs(found[place] - expected).max() < 1e-4
    state = server.state()
    assert state.is_frozen and state.version is None and state.vocab_size == 128 and state.fingerprint and state.vocabulary

    def said(path, body, status=409):
        with pytest.raises(ServerAnswerError) as caught:
            server.call(path, body)
        assert caught.value.status == status
        return str(caught.value)

    for path, body in (
        ("/claim", wire.ClaimRequest(run="r", incarnation="1")), ("/weights", wire.WeightUpdateRequest(version=0, link="l")),
        ("/adapter", wire.EmptyBody()), ("/join", wire.EmptyBody()), ("/generate", wire.EmptyBody()), ("/score", wire.EmptyBody()),
    ):  # fmt: skip
        assert "this server is frozen" in said(path, body) and path in said(path, body)
    assert "at most 63 (max_model_len - 1) tokens" in said(ROUTE, wire.PromptLogprobsRequest(sequences=(tuple([5] * 64),), first=(1,)), 400)
    assert "token id 128 is outside the vocabulary of the teacher's model (128)" in said(
        ROUTE, wire.PromptLogprobsRequest(sequences=((5, 128),), first=(1,)), 400
    )
    connection, answer = server.request("POST", ROUTE, b"{}", headers={})
    assert answer.status == 401
    connection.close()
    assert [server.state().boot, server.state().owner] == [state.boot, None]


def without_rewards(flags: list[str]) -> list[str]:
    at = flags.index("--reward_funcs")
    return [*flags[:at], *flags[at + 2 :]]


@pytest.fixture
def named(teacher):
    """The flags that name the teacher."""
    return ["--teacher_model_server", f"@{teacher[0].address_file}"]


def compute_kl(teacher, student) -> float:
    """Return the mean over tokens of the exact KL(student || teacher), on texts that neither was trained on."""
    ids = torch.from_numpy(np.random.default_rng(11).integers(4, 128, (16, 12)))
    with torch.no_grad():
        p, q = (load_tiny(path)(ids).logits.log_softmax(-1) for path in (student, teacher))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_teacher_kl_to_student_falls_without_rewards(teacher, folder, named):
    flags = without_rewards(write_inputs(folder / "run"))
    flags += ["--output_dir", str(folder / "out"), "--max_steps", str(STEPS), "--lr", "3e-3", "--save_steps", str(STEPS)]
    assert run_ranks(train, 2, [*flags, *named], env=ASKS, timeout=180) == [0, 0]
    steps = read_jsonl(folder / "out" / "metrics.jsonl")
    kl = [step["teacher_kl"] for step in steps]
    assert np.mean(kl[-3:]) < 0.75 * np.mean(kl[:3]), kl
    assert all("reward" not in step and step["time/teacher"] > 0 for step in steps)
    before, after = (compute_kl(teacher[1], path) for path in (folder / "run" / "model", folder / "out" / "hf"))
    assert after < 0.9 * before, (before, after)


def test_teacher_logprobs_survive_resume_with_another_weight(folder, named):
    """The second step of a rollout is trained from a checkpoint, on pending rows, without another request to the teacher."""
    inputs = [*write_inputs(folder / "two"), "--save_steps", "1", "--record_rows", "true", "--export_hf", "false"]
    inputs += ["--steps_per_generation", "2", "--max_steps", "2", "--verify_weight_sync", "false"]
    assert run_ranks(train, 1, [*inputs, *named, "--output_dir", str(folder / "whole")], env=ASKS) == [0]
    first = str(folder / "whole" / "checkpoints" / "iter_0000001")
    # Half of the coefficient: the resumed step is foretold by `compare-losses` on the rows that the whole run recorded.
    changed = [*inputs, *named, "--output_dir", str(folder / "resumed"), "--resume", first, "--teacher_kl_coef", "0.5"]
    assert run_ranks(train, 1, changed, env=ASKS) == [0]
    argv = [str(folder / "whole"), "--step", "1", "--json", "--variant", "teacher_kl_coef=0.5"]
    [(code, said)] = run_ranks(compare_losses, 1, argv, env=ASKS)
    assert code == 0, said
    own, half = json.loads(said)["variants"]
    [step] = [one for one in read_jsonl(folder / "whole" / "metrics.jsonl") if one["step"] == 2]
    [resumed] = [one for one in read_jsonl(folder / "resumed" / "metrics.jsonl") if one["step"] == 2]
    for name in ("loss", "grad_norm"):
        assert own[name] == pytest.approx(step[name], rel=1e-5, abs=1e-7)
        assert half[name] == pytest.approx(resumed[name], rel=1e-5, abs=1e-7)
        assert half[name] != pytest.approx(own[name], rel=1e-2)
    assert resumed["teacher_kl"] == pytest.approx(step["teacher_kl"], rel=1e-5) and resumed["staleness/max"] == 1


def run_refused(rank: int, world_size: int, flags: list[str]) -> str:
    """Return the output of a run with exit code 2. For `run_ranks`."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = train(rank, world_size, flags)
    assert code == 2, said.getvalue()
    return " ".join(said.getvalue().split())


def test_teacher_with_another_vocabulary_is_an_error_before_loading(folder, named, teacher):
    flags = write_inputs(folder / "other", vocab=120)
    for words, sentence in (
        (named, "whose vocabulary differs from the policy's"),
        (["--teacher_model", str(teacher[1])], "has a tokenizer that differs from the policy's"),
    ):
        [said] = run_ranks(run_refused, 1, [*flags, *words, "--output_dir", str(folder / "none")], env=ASKS)
        assert sentence in said and not (folder / "none" / "metrics.jsonl").exists()
    flags = [*write_inputs(folder / "long"), *named, "--output_dir", str(folder / "none"), "--max_completion_length", "100"]
    assert "start it with --vllm_max_model_len 107" in run_ranks(run_refused, 1, flags, env=ASKS)[0]


def test_teacher_server_is_rejected_as_rollout_server(teacher, folder, named):
    flags = ["--vllm_mode", "server", "--vllm_server_host", f"@{teacher[0].address_file}", "--output_dir", str(folder / "none")]
    inputs = write_inputs(folder / "pushed")
    at = inputs.index("--vllm_kv_cache_memory_mb")
    assert "is frozen and accepts no weight updates" in run_ranks(run_refused, 1, [*inputs[:at], *flags], env=ASKS)[0]


# ---- in the training ranks -------------------------------------------------------------------------------------------------------------


def make_scripted_flags(folder, *more: str) -> list[str]:
    """Return flags of runs with scripted completions, without vLLM: two short steps."""
    flags = write_inputs(folder)
    at = flags.index("--vllm_kv_cache_memory_mb")
    return [*flags[:at], *flags[at + 2 :], "--global_batch_size", "8", "--max_steps", "2", "--export_hf", "false", *more]


def capture_output(rank: int, world_size: int, flags: list[str]) -> str:
    """Return the output of a run. For `run_ranks`."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = scripted.train(rank, world_size, flags)
    assert code == 0, said.getvalue()
    return said.getvalue()


def assert_same_steps(one, other, **within) -> None:
    ours, theirs = (read_jsonl(path / "metrics.jsonl") for path in (one, other))
    for name in ("loss", "grad_norm", "teacher_kl"):
        assert [step[name] for step in ours] == pytest.approx([step[name] for step in theirs], **within), name


def test_local_teacher_equals_teacher_server_and_resume_logs_another_teacher(teacher, folder, named, tmp_path):
    flags = make_scripted_flags(tmp_path / "in", "--save_steps", "1", "--save_total_limit", "none")
    held = ["--teacher_model", str(teacher[1]), "--offload_teacher_model", "true", "--tensor_model_parallel_size", "2"]
    said = run_ranks(capture_output, 1, [*flags, *named, "--output_dir", str(tmp_path / "served")], env=ASKS)
    run_ranks(capture_output, 2, [*flags, *held, "--sequence_parallel", "true", "--output_dir", str(tmp_path / "held")])
    assert_same_steps(tmp_path / "held", tmp_path / "served", rel=1e-4)
    # Wherever it is, a checkpoint knows which one it was.
    first = [tmp_path / where / "checkpoints" / "iter_0000001" for where in ("served", "held")]
    before, same = (json.loads((path / "manifest.json").read_text())["content"]["teacher"] for path in first)
    assert before == same == teacher[0].state().fingerprint
    other = write_tiny(tmp_path / "other", hidden=96, layers=4, ffn=160, seed=3, std=0.05)
    [said] = run_ranks(
        capture_output, 1, [*flags, "--teacher_model", str(other), "--resume", str(first[0]), "--output_dir", str(tmp_path / "2")]
    )
    assert f"teacher  {before} -> qwen3" in said
    now = json.loads((tmp_path / "2" / "checkpoints" / "iter_0000002" / "manifest.json").read_text())["content"]["teacher"]
    again = [*flags, *named, "--resume", str(tmp_path / "2"), "--max_steps", "3", "--output_dir", str(tmp_path / "3")]
    assert f"teacher  {now} -> {before}" in run_ranks(capture_output, 1, again, env=ASKS)[0]


def test_async_lora_run_with_reference_and_teacher_resumes_exactly(teacher, tmp_path):
    flags = [*make_scripted_flags(tmp_path / "in", *AHEAD, *CORRECTED, *LORA), "--max_steps", "4", "--save_steps", "2"]
    flags += ["--teacher_model", str(teacher[1]), "--beta", "0.1", "--temperature", "0.7", "--max_tokens_per_micro_batch", "40"]
    run_ranks(capture_output, 2, [*flags, "--output_dir", str(tmp_path / "whole")])
    first = str(tmp_path / "whole" / "checkpoints" / "iter_0000002")
    run_ranks(capture_output, 2, [*flags, "--output_dir", str(tmp_path / "resumed"), "--resume", first])
    whole, resumed = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed"))
    for name in ("loss", "grad_norm", "teacher_kl", "kl"):
        assert [step[name] for step in whole[2:]] == [step[name] for step in resumed]
    assert whole[0]["time/teacher"] > 0


def test_moe_teacher_under_expert_parallelism_equals_one_rank(tmp_path):
    large = write_tiny(tmp_path / "large", "qwen3_moe", layers=3, ffn=36, seed=3, std=0.05)
    flags = [*make_scripted_flags(tmp_path / "in"), "--teacher_model", str(large), "--temperature", "0.9"]
    run_ranks(capture_output, 1, [*flags, "--output_dir", str(tmp_path / "one")])
    looked_at = [
        "--check_replicas",
        "true",
        "--check_replicas_interval",
        "1",
        "--logprob_diff_warn",
        "0.001",
        "--save_steps",
        "1",
        "--record_rows",
        "true",
    ]
    flags += ["--expert_model_parallel_size", "2", "--dynamic_sample", "true", *looked_at]
    run_ranks(capture_output, 2, [*flags, "--output_dir", str(tmp_path / "two")])
    assert_same_steps(tmp_path / "two", tmp_path / "one", rel=1e-4)
    large.rename(tmp_path / "gone")
    steps = read_jsonl(tmp_path / "two" / "metrics.jsonl")
    [step_dump] = (tmp_path / "two" / "debug_dump").iterdir()
    [(code, replay)] = run_ranks(replayed, 1, step_dump, "--json", "true")
    assert code == 0 and replay["numbers"] == pytest.approx({name: steps[0][name] for name in ("loss", "grad_norm")}, rel=1e-4)
    [(code, said)] = run_ranks(compare_losses, 1, [str(tmp_path / "two"), "--json", "--variant", "teacher_kl_coef=0"])
    own, without = json.loads(said)["variants"]
    assert code == 0 and own["loss"] == pytest.approx(steps[1]["loss"], rel=1e-4) and without["loss"] != pytest.approx(own["loss"], rel=0.1)
