"""Checkpoints of a real Megatron model and its distributed optimizer on gloo ranks."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_grpo.core.metadata import Progress
from megatron_grpo.core.types import Sample, SampleWithOldLogprobs
from tests import fused_adam
from tests.ranks import run_ranks

LAYERS = 4


class Prompts:
    """A prompt stream with the interface that a checkpoint uses."""

    def __init__(self, position: int = 0):
        self.position = position

    def state(self):
        return {"position": self.position}

    def list_images(self, number):
        return ()

    def restore(self, state):
        self.position = state["position"]


class PendingRows:
    """Pending rows with the interface that a checkpoint uses; the first rank holds all."""

    def __init__(self, samples=()):
        self.samples = list(samples)
        versions = {sample.rollout: sample.version for sample in self.samples}
        rollouts, versions = np.array([*versions.items()], dtype=np.int64).reshape(-1, 2).T
        self.rows = SimpleNamespace(rollout=rollouts, version=versions)

    def __len__(self):
        return len(self.samples)

    def to_save(self):
        import torch.distributed as dist

        return self.samples if dist.get_rank() == 0 else []

    def restored(self, samples):
        return PendingRows(samples)


class SmallPolicy:
    """A small GPT with Megatron's DDP and distributed optimizer.

    The gradient of `step` is a function of each weight alone, so each layout takes the same step.
    """

    def __init__(self, world_size, *, tp=1, pp=1, vpp=None, ep=1, experts=None, bf16=False, seed=0, hidden=64, distributed=True, lr=1e-2,
                 fused=False):  # fmt: skip
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megatron_grpo.core.parallel.layout import Layout
        from megatron_grpo.core.parallel.state import start
        from megatron_grpo.core.policy.kernels import Norm

        start(Layout(world_size=world_size, tp=tp, pp=pp, vpp=vpp, ep=ep), seed=seed)
        from megatron.core import parallel_state as ps

        if fused:
            fused_adam.take()

        dtype = torch.bfloat16 if bf16 else torch.float32
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=hidden,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=96,
            kv_channels=16,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=bf16,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            add_bias_linear=False,
            qk_layernorm=True,
            attention_dropout=0,
            hidden_dropout=0,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            num_moe_experts=experts,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
            moe_ffn_hidden_size=32 if experts else None,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
        )
        spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm")
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = Norm
        models = []
        for stage in range(vpp or 1):
            where = dict(ignore_virtual=False, vp_stage=stage) if vpp else {}
            models.append(
                GPTModel(
                    config,
                    TransformerBlockSubmodules([spec] * (LAYERS // pp // (vpp or 1)), Norm),
                    vocab_size=64,
                    max_sequence_length=64,
                    pre_process=ps.is_pipeline_first_stage(**where),
                    post_process=ps.is_pipeline_last_stage(**where),
                    share_embeddings_and_output_weights=False,
                    position_embedding_type="rope",
                    **({"vp_stage": stage} if vpp else {}),
                )
            )
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.chunks = [DistributedDataParallel(config, ddp, model.bfloat16() if bf16 else model) for model in models]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                min_lr=0.0,
                weight_decay=0.1,
                params_dtype=dtype,
                bf16=bf16,
                clip_grad=0.0,
                use_distributed_optimizer=distributed,
            ),
            self.chunks,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=lr,
            min_lr=0.0,
            lr_warmup_steps=2,
            lr_decay_steps=20,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=20,
            wd_incr_style="constant",
        )

    def step(self):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(parameter.detach().float() * 0.5 + 0.01)
        self.optimizer.step()
        self.scheduler.step(1)

    def sharded_state_dict(self, *, is_loading, with_optimizer=True):
        from megatron_grpo.core.policy.sharded_state import sharded_state

        return sharded_state(self.chunks, self.optimizer, self.scheduler, is_loading=is_loading)

    def load_sharded_state_dict(self, state, *, with_optimizer=True):
        from megatron_grpo.core.policy.sharded_state import load_state

        load_state(self.chunks, self.optimizer, self.scheduler, state)

    def gradient_check_state(self):
        return {"skips": {"total": 0, "in_a_row": 0}, "guard": {}}

    def restore_gradient_check(self, state):
        assert state == self.gradient_check_state()

    def on_device(self, part):
        return contextlib.nullcontext()


def make_checkpoint_manager(folder, resume="auto", **settings):
    from megatron_grpo.run.checkpoint.resume import find_checkpoints
    from megatron_grpo.run.checkpoint.saving import Checkpoints
    from megatron_grpo.run.config.settings import RunConfig

    print_line = settings.pop("print_line", None)
    return Checkpoints(
        find_checkpoints(folder, resume), RunConfig(**{"save_steps": 1, "save_total_limit": None} | settings), print_line=print_line
    )


def make_pending_samples():
    rng = np.random.default_rng(0)

    def fields(row, length):
        return dict(
            row=row,
            rollout=2,
            prompt_number=7,
            version=3,
            on_policy_version=3,
            token_ids=rng.integers(0, 64, length),
            mask=np.arange(length) > 2,
            sampler_logprobs=-rng.random(length, dtype=np.float32),
            advantage=float(rng.normal()),
            is_zero_std=row == 1,
            is_truncated=False,
        )

    return [
        Sample(**fields(0, 5)),
        SampleWithOldLogprobs(**fields(1, 9), old_logprobs=-rng.random(9, dtype=np.float32), old_logprobs_from="recompute"),
        Sample(**fields(2, 4)),
    ]


def restore_samples(keeper, policy, prompts):
    keeper.choose()
    return keeper.restore(policy, prompts, PendingRows())


def save_after(rank, world_size, folder, steps, more, layout):
    """Save after `steps` optimizer steps, and again after `more` steps."""
    policy = SmallPolicy(world_size, **layout)
    keeper = make_checkpoint_manager(folder)
    for step in range(1, steps + more + 1):
        policy.step()
        if step in (steps, steps + more):
            keeper.save(
                Progress(step=step, num_rollouts=step, num_prompts=4 * step, num_tokens=100 * step),
                PendingRows(make_pending_samples()),
                policy,
                Prompts(4 * step),
            )


def resume_and_save(rank, world_size, source, folder, more, layout):
    """Resume in `layout`, save at once and after `more` steps; return the log lines."""
    policy, prompts = SmallPolicy(world_size, **layout, seed=1), Prompts()
    progress, pending = restore_samples(make_checkpoint_manager(source), policy, prompts)
    keeper = make_checkpoint_manager(folder)
    keeper.save(progress, pending, policy, prompts)
    for _ in range(more):
        policy.step()
        progress = replace(progress, step=progress.step + 1)
    keeper.save(progress, pending, policy, prompts)
    return progress, pending.samples, prompts.position, policy.scheduler.num_steps, policy.optimizer.param_groups[0]["lr"]


def save_with_metrics(rank, world_size, folder):
    """Save with unreported metrics and without; return the metrics that a resumed run gets of each."""
    policy, stats = SmallPolicy(world_size), [{"reward": np.float32(0.5)}, {}]
    received = []
    for step, waiting in enumerate(stats, 1):
        keeper = make_checkpoint_manager(folder)
        keeper.logger = SimpleNamespace(compute_unreported_stats=lambda waiting=waiting: waiting)
        keeper.save(Progress(step=step), PendingRows(), policy, Prompts())
        again = make_checkpoint_manager(folder)
        again.logger = SimpleNamespace()
        restore_samples(again, policy, Prompts())
        received.append(again.logger.restored_stats)
    return received


def test_save_keeps_metrics_that_no_step_has_reported(tmp_path):
    assert run_ranks(save_with_metrics, 2, tmp_path)[0] == [{"reward": 0.5}, {}]
    assert not (make_run(tmp_path, 2) / "grpo/metrics.json").exists()


def read_tensors(directories):
    """Return all tensors of each checkpoint by global name and shape, in one process."""

    def read(rank, world_size):
        import torch
        from megatron.core import dist_checkpointing

        from megatron_grpo.core.parallel import cpu

        cpu.enable()
        # numpy, or it would travel as storages shared by file descriptor
        return [
            {
                name: value.float().numpy()
                for name, value in dist_checkpointing.load_plain_tensors(str(d)).items()
                if isinstance(value, torch.Tensor)
            }
            for d in directories
        ]

    return run_ranks(read, 1)[0]


def make_run(directory, step):
    return Path(directory) / "checkpoints" / f"iter_{step:07d}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directory of a run on one rank with checkpoints after 2 and 4 optimizer steps."""
    folder = tmp_path_factory.mktemp("one_rank")
    run_ranks(save_after, 1, folder, 2, 2, {})
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """Directory with a copy of that run, which a test may change."""
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "world_size, layout",
    [(2, {"tp": 2}), (2, {"pp": 2}), (2, {}), (2, {"pp": 2, "vpp": 2}), (4, {"tp": 2})],
    ids=["tp2", "pp2", "dp2", "pp2_vpp2", "tp2_dp2"],
)
def test_resume_from_one_rank_in_another_layout_gives_same_weights_and_moments(saved, tmp_path, world_size, layout):
    start_from_two(saved, tmp_path / "source")
    told = run_ranks(resume_and_save, world_size, tmp_path / "source", tmp_path / "new", 2, layout)
    for step in (2, 4):
        before, after = read_tensors([make_run(saved, step), make_run(tmp_path / "new", step)])
        assert before.keys() == after.keys()
        assert any("exp_avg_sq" in name for name in before) and any(name.startswith("decoder") for name in before)
        for name in before:
            assert np.array_equal(before[name], after[name]), f"{name} at step {step}"
    progress, pending, position, num_steps, lr = told[-1]
    assert (progress.step, progress.num_tokens, position, num_steps) == (4, 200, 8, 4)
    assert lr == pytest.approx(1e-2 * (1 - 2 / 18))


def test_resume_experts_in_another_expert_layout_gives_same_weights(tmp_path):
    run_ranks(save_after, 1, tmp_path / "one", 2, 2, {"experts": 4})
    start_from_two(tmp_path / "one", tmp_path / "source")
    run_ranks(resume_and_save, 2, tmp_path / "source", tmp_path / "new", 2, {"experts": 4, "ep": 2})
    before, after = read_tensors([make_run(tmp_path / "one", 4), make_run(tmp_path / "new", 4)])
    assert before.keys() == after.keys() and any("exp_avg" in name and "expert" in name for name in before)
    for name in before:
        assert np.array_equal(before[name], after[name]), name


def start_from_two(saved, source):
    shutil.copytree(saved, source, ignore=lambda folder, names: {"iter_0000004"} & set(names))


def test_resume_from_tp2_dp2_on_one_rank_gives_same_weights(tmp_path):
    run_ranks(save_after, 4, tmp_path / "four", 2, 0, {"tp": 2, "bf16": True})
    run_ranks(resume_and_save, 1, tmp_path / "four", tmp_path / "one", 0, {"bf16": True})
    before, after = read_tensors([make_run(tmp_path / "four", 2), make_run(tmp_path / "one", 2)])
    assert before.keys() == after.keys()
    for name in before:
        assert np.array_equal(before[name], after[name]), name
    main = before["optimizer.state.param.embedding.word_embeddings.weight"]
    assert not np.array_equal(main, before["embedding.word_embeddings.weight"])  # bf16 and fp32 copies are two things


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_resume_without_distributed_optimizer_equals_uninterrupted_run(tmp_path, bf16):
    layout = {"bf16": bf16, "distributed": False}
    run_ranks(save_after, 1, tmp_path / "one", 2, 2, layout)
    start_from_two(tmp_path / "one", tmp_path / "source")
    run_ranks(resume_and_save, 2, tmp_path / "source", tmp_path / "new", 2, layout)
    before, after = read_tensors([make_run(tmp_path / "one", 4), make_run(tmp_path / "new", 4)])
    assert before.keys() == after.keys() and any("exp_avg_sq" in name for name in before)
    for name in before:
        assert np.array_equal(before[name], after[name]), name


@pytest.mark.parametrize(
    "layout",
    [{}, {"bf16": True}, {"distributed": False}, {"bf16": True, "distributed": False}, {"experts": 4},
     {"fused": True, "experts": 4}, {"fused": True, "bf16": True, "distributed": False}],
    ids=["fp32", "bf16", "fp32, whole", "bf16, whole", "experts", "FusedAdam, experts", "FusedAdam, bf16, whole"],
)  # fmt: skip
def test_resume_after_each_step_equals_uninterrupted_run(tmp_path, layout):
    """The second resume reads a checkpoint of a resumed run."""
    run_ranks(save_after, 1, tmp_path / "whole", 3, 0, layout)
    run_ranks(save_after, 1, tmp_path / "one", 1, 0, layout)
    run_ranks(resume_and_save, 1, tmp_path / "one", tmp_path / "two", 1, layout)
    run_ranks(resume_and_save, 1, tmp_path / "two", tmp_path / "three", 1, layout)
    before, after = read_tensors([make_run(tmp_path / "whole", 3), make_run(tmp_path / "three", 3)])
    assert before.keys() == after.keys() and any("exp_avg_sq" in name for name in before)
    for name in before:
        assert np.array_equal(before[name], after[name]), name


def test_resume_before_the_first_step_works(tmp_path):
    """All samples of the first global batch may have been filtered out."""
    run_ranks(save_after_nothing, 2, tmp_path)
    [(progress, *_)] = run_ranks(resume_and_save, 1, tmp_path, tmp_path / "new", 1, {})
    assert progress.step == 2


def save_after_nothing(rank, world_size, folder):
    make_checkpoint_manager(folder).save(Progress(step=1), PendingRows(), SmallPolicy(world_size), Prompts())


def test_resume_logs_change_of_a_fingerprint_that_is_known_late(tmp_path):
    """An example is vLLM's model runner, which a resumed run keeps."""

    def run(rank, world_size):
        told = []
        keeper = make_checkpoint_manager(tmp_path / "run", print_line=told.append)
        keeper.choose()
        first = keeper.recorded("runner")
        keeper.record_fingerprint("runner", "V1")
        keeper.save(Progress(step=1), PendingRows(), SmallPolicy(world_size), Prompts())
        for now in ("V1", "V2"):
            keeper = make_checkpoint_manager(tmp_path / "run", print_line=told.append)
            keeper.choose()
            keeper.record_fingerprint("runner", now)
        return first, keeper.recorded("runner"), told

    [(first, recorded, told)] = run_ranks(run, 1)
    assert (first, recorded) == (None, "V1")
    assert [line for line in told if "runner" in line] == ["Changed since that checkpoint:\n  runner  V1 -> V2"]


def test_resume_uses_the_learning_rate_of_the_new_settings(saved, tmp_path):
    start_from_two(saved, tmp_path / "source")
    [(*_, lr)] = run_ranks(resume_and_save, 1, tmp_path / "source", tmp_path / "new", 2, {"lr": 1e-3})
    assert lr == pytest.approx(1e-3 * (1 - 2 / 18))


def test_resume_restores_pending_samples_exactly_and_in_order(saved, tmp_path):
    [(_, pending, *_)] = run_ranks(resume_and_save, 1, saved, tmp_path, 0, {})
    assert_same_samples(pending, make_pending_samples())


def assert_same_samples(got, wanted):
    assert [type(sample) for sample in got] == [type(sample) for sample in wanted]
    for one, other in zip(got, wanted, strict=True):
        for name in one.__dataclass_fields__:
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(b, np.ndarray):
                assert a.dtype == b.dtype and np.array_equal(a, b), name
            else:
                assert type(a) is type(b) and a == b, name


def restore_only(rank, world_size, folder, resume="auto"):
    """Return the step that was resumed and the log lines, or the message of the ConfigError."""
    from megatron_grpo.core.base.errors import ConfigError

    heard = []
    policy = SmallPolicy(world_size, seed=1)
    try:
        progress, _ = restore_samples(make_checkpoint_manager(folder, resume, print_line=heard.append), policy, Prompts())
    except ConfigError as error:
        return str(error), heard
    return progress.step, heard


def restore_watched(rank, world_size, folder):
    """Return what the progress display shows while a rank restores."""
    from megatron_grpo.core.base import activity

    shown, advance = [], activity.advance

    def noted(done=1):
        advance(done)
        shown.append(activity.describe(activity.current()))

    activity.advance = noted
    restore_only(rank, world_size, folder)
    return shown


def test_resume_progress_display_counts_all_tensors(saved):
    for shown in run_ranks(restore_watched, 2, saved):
        counts = [re.fullmatch(r"restoring (\d+) of (\d+) tensors", line) for line in shown]
        numbers = [(int(found[1]), int(found[2])) for found in counts if found]
        total = numbers[0][1]
        assert total > LAYERS and numbers == [(0, total), *((number, total) for number in range(1, total + 1))]


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm, file, says", [
    (flip_a_byte, "__0_0.distcp", "has changed"),
    (lambda path: path.write_bytes(path.read_bytes()[:-10]), "__0_0.distcp", "bytes"),
    (Path.unlink, "common.pt", "is missing"),
    (flip_a_byte, "grpo/pending/rank_00000.npz", "has changed"),
    (lambda path: path.write_text(path.read_text()[:40]), "manifest.json", "cannot be read"),
], ids=["flipped_bit", "truncated", "missing", "flipped_bit_in_samples", "truncated_manifest"])  # fmt: skip
def test_resume_names_damage_and_uses_the_checkpoint_before(copy, harm, file, says):
    harm(make_run(copy, 4) / file)
    results = run_ranks(restore_only, 2, copy)
    assert [step for step, _ in results] == [2, 2]
    warnings = [text for _, heard in results for text in heard if "damaged" in text or "is skipped" in text]
    assert len(warnings) == 1 and file in warnings[0] and says in warnings[0]


def test_resume_from_a_named_damaged_checkpoint_is_an_error_with_the_file(copy):
    flip_a_byte(make_run(copy, 4) / "__0_0.distcp")
    for said, _ in run_ranks(restore_only, 2, copy, str(make_run(copy, 4))):
        assert "iter_0000004/__0_0.distcp has changed" in said


def test_resume_from_only_damaged_checkpoints_is_an_error(copy):
    for step in (2, 4):
        flip_a_byte(make_run(copy, step) / "__0_0.distcp")
    [(said, _)] = run_ranks(restore_only, 1, copy)
    assert "No usable checkpoint" in said and "iter_0000002" in said and "iter_0000004" in said


def test_resume_from_empty_output_dir_starts_a_new_run(tmp_path):
    assert run_ranks(restore_only, 1, tmp_path)[0][0] == 0


def test_resume_from_output_dir_of_another_run_works(saved):
    assert run_ranks(restore_only, 1, saved / "elsewhere", str(saved))[0][0] == 4


def test_resume_from_checkpoint_of_another_model_is_an_error_with_its_directory(saved):
    def resume_wider(rank, world_size):
        from megatron_grpo.core.base.errors import ConfigError

        with pytest.raises(ConfigError, match="iter_0000004 is not damaged but does not match"):
            restore_samples(make_checkpoint_manager(saved), SmallPolicy(world_size, hidden=128), Prompts())

    run_ranks(resume_wider, 2)


def test_save_write_error_stops_all_ranks_and_keeps_older_checkpoint(tmp_path):
    def fill_the_disk(rank, world_size):
        import resource
        import signal

        from megatron_grpo.run.checkpoint.saving import CheckpointError

        policy, keeper = SmallPolicy(world_size), make_checkpoint_manager(tmp_path)
        policy.step()
        keeper.save(Progress(step=1), PendingRows(), policy, Prompts())
        policy.step()
        if rank == 1:  # the kernel then says "File too large", where a full disk says "No space left on device"
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        said = "step 2 failed and was removed.*complete checkpoint is of step 1.*rank 1: OSError.*File too large"
        with pytest.raises(CheckpointError, match=said):
            keeper.save(Progress(step=2), PendingRows(), policy, Prompts())

    run_ranks(fill_the_disk, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_save_write_error_of_rank_0_stops_all_ranks(tmp_path):
    def fill_the_disk(rank, world_size):
        import resource
        import signal

        from megatron_grpo.run.checkpoint.saving import CheckpointError

        policy = SmallPolicy(world_size)
        policy.step()
        if rank == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match="rank 0"):
            make_checkpoint_manager(tmp_path).save(Progress(step=1), PendingRows(), policy, Prompts())

    run_ranks(fill_the_disk, 2)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_saving_starts_no_process(tmp_path):
    def save(rank, world_size):
        import os

        policy = SmallPolicy(world_size)
        policy.step()
        make_checkpoint_manager(tmp_path).save(Progress(step=1), PendingRows(), policy, Prompts())
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text()

    assert run_ranks(save, 1) == [""]


def test_save_keeps_newest_checkpoints_and_pointer_names_the_last(tmp_path):
    def save_five(rank, world_size):
        policy, keeper = SmallPolicy(world_size), make_checkpoint_manager(tmp_path, save_steps=2, save_total_limit=2)
        for step in range(1, 9):
            policy.step()
            assert keeper.are_due(step) == (step % 2 == 0)
            if keeper.are_due(step):
                assert keeper.save(Progress(step=step), PendingRows(), policy, Prompts())

    run_ranks(save_five, 2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["iter_0000006", "iter_0000008", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "8\n"


def test_save_marks_checkpoint_once_its_samples_are_trained_and_keeps_the_last_marked_one(tmp_path):
    """Saves after steps 1 to 4, of which one step trained samples of version 2; then the run resumes from 4 and trains."""

    def run(rank, world_size):
        policy, keeper, told = SmallPolicy(world_size), make_checkpoint_manager(tmp_path, save_total_limit=2), []
        for step in range(1, 5):
            policy.step()
            if step == 4:
                keeper.has_trained(2, step)
            told.append(keeper.last_good(step))
            keeper.save(Progress(step=step), PendingRows(), policy, Prompts())
        again = make_checkpoint_manager(tmp_path, save_total_limit=2)
        restore_samples(again, policy, Prompts())
        again.has_trained(3, 5)
        told.append(again.last_good(5))
        again.has_trained(4, 6)
        told.append(again.last_good(5))
        return told

    second, fourth = (tmp_path / "checkpoints" / f"iter_000000{step}" for step in (2, 4))
    assert run_ranks(run, 2) == [[None, None, None, second, second, fourth]] * 2
    assert sorted((tmp_path / "checkpoints").glob("iter_*")) == [second, fourth]


def test_save_is_due_after_the_interval_in_seconds(tmp_path, monkeypatch):
    from megatron_grpo.run.checkpoint import saving

    now = [100.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    never, keeper = (
        make_checkpoint_manager(tmp_path, save_steps=0),
        make_checkpoint_manager(tmp_path, save_steps=0, save_interval_seconds=30.0),
    )
    now[0] = 1000.0  # the model has been loaded
    keeper.restore(None, None, PendingRows())
    found = []
    for seconds in (0.0, 29.0, 30.0, 90.0):
        now[0] = 1000.0 + seconds
        found.append(keeper.is_time())
    assert found == [False, False, True, True] and not never.is_time()
    keeper._saved_at = now[0]
    assert not keeper.is_time()


def test_manifest_lists_all_files_and_version_of_pending_samples(saved):
    directory = make_run(saved, 4)
    manifest = json.loads((directory / "manifest.json").read_text())
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {"manifest.json"}
    assert manifest["versions"] == {"2": 3} and manifest["progress"]["step"] == 4
    assert all(re.fullmatch("[0-9a-f]{64}", entry["sha256"]) for entry in manifest["files"].values())


def test_resume_restores_random_generators(tmp_path):
    def draw():
        import random

        import torch

        return random.random(), float(np.random.random()), float(torch.rand(()))

    def run(rank, world_size):
        policy = SmallPolicy(world_size)
        policy.step()
        make_checkpoint_manager(tmp_path).save(Progress(step=1), PendingRows(), policy, Prompts())
        uninterrupted = draw()
        draw()
        restore_samples(make_checkpoint_manager(tmp_path), policy, Prompts())
        return uninterrupted, draw()

    for uninterrupted, resumed in run_ranks(run, 2):
        assert uninterrupted == resumed


def test_resume_from_checkpoint_with_code_is_an_error_and_runs_no_code(copy, tmp_path):
    """Whoever can write a checkpoint can also write its checksums."""
    from megatron_grpo.run.checkpoint.manifest import with_digest
    from tests.checkpoint_files import fingerprints

    class Runs:
        def __reduce__(self):
            import os

            return os.mkdir, (str(tmp_path / "it ran"),)

    directory = make_run(copy, 4)
    (directory / ".metadata").write_bytes(pickle.dumps(Runs()))
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"] |= fingerprints(directory, [".metadata"])
    (directory / "manifest.json").write_text(json.dumps(with_digest(manifest)))
    said = [said for said, _ in run_ranks(restore_only, 2, copy)]
    assert all("it would execute code when read" in str(text) for text in said)
    assert not (tmp_path / "it ran").exists()
