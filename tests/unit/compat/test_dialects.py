"""Translation of other frameworks' settings: each has an effect here or is rejected or reported; none is dropped silently."""

from __future__ import annotations

import functools
import json

import pytest

from megatron_grpo.cli import main
from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.check import check_parsed
from megatron_grpo.run.config import parse, table
from tests.checked import check
from tests.unit.planning.test_estimates import TINY


def read(dialect: str, *words: str):
    """The configuration that a command line makes in a dialect."""
    return check(["--dialect", dialect, *words]).config


def find_problems(dialect: str, *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(["--dialect", dialect, *words])
    return "\n".join(problem.message for problem in error.value.problems)


def read_setting(cfg, name: str):
    return getattr(getattr(cfg, table()[name].group), name)


SWIFT_SCRIPT = """
NPROC_PER_NODE=4 \\
megatron rlhf \\
    --rlhf_type grpo --model /nowhere/model --tuner_type full --use_vllm true --vllm_mode colocate \\
    --dataset rows.jsonl --num_train_epochs 1 --train_iters 100 --eval_steps 1000 \\
    --global_batch_size 32 --micro_batch_size 2 --num_generations 8 --steps_per_generation 2 \\
    --reward_funcs accuracy format --max_length 512 --max_completion_length 1024 --top_k -1 \\
    --loss_type grpo --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --lr 1e-6 \\
    --offload_model true --finetune --no_save_optim --dataloader_num_workers 8 --attention_backend flash \\
    --recompute_granularity selective --sequence_parallel true --log_completions true --report_to wandb
"""


def test_megatron_swift_script_is_translated_completely(tmp_path):
    script = tmp_path / "grpo.sh"
    script.write_text(SWIFT_SCRIPT)
    checked = check(["--config", str(script), "--dialect", "swift"])
    cfg, parsed = checked.config, checked.parsed
    assert (cfg.parallel.world_size, cfg.batch.generation_batch_size, cfg.plan.dialect) == (4, 64, "swift-megatron")
    assert (cfg.rewards.reward_funcs, cfg.data.max_prompt_length, cfg.rollout.top_k) == (["math", "format"], 512, 0)
    assert (cfg.run.max_steps, cfg.run.num_train_epochs, cfg.eval.eval_steps) == (None, 1.0, 0), "its epochs decide; no val_dataset"
    assert not cfg.parallel.sequence_parallel, "without tensor parallelism it is off there too"
    assert "num_train_epochs (1) sets the length" in " ".join(parsed.notes)
    assert (cfg.rollout.offload_model, cfg.rollout.offload_optimizer) == ("true", "auto"), "the same names, and only memory"
    assert set(parsed.aside["grpo.sh"]) >= {"no_save_optim", "dataloader_num_workers", "attention_backend"}
    assert not set(parsed.aside["grpo.sh"]) & {"reward_funcs", "lr", "epsilon", "top_k", "max_length"}


def test_framework_defaults_that_differ_are_applied_and_shown_once(tmp_path, capsys):
    cfg = read("swift")
    for name, theirs in {"beta": 0.04, "lr": 1e-5, "lr_decay_style": "cosine", "weight_decay": 0.1, "temperature": 0.9}.items():
        assert read_setting(cfg, name) == theirs
        assert cfg.sources[name] == "Megatron-SWIFT's default"
    assert main(["plan", "--dialect", "swift", "--weight_decay", "0.0"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows.count(["beta", "0.04", "0.0", "0.04"]) == 1 and rows.count(["lr_decay_style", "cosine", "constant", "cosine"]) == 1
    assert rows.count(["report_to", "tensorboard", "none", "none"]) == 1, "where ours is used, the table says so"
    assert not any(row[:1] == ["weight_decay"] for row in rows), "it was typed"
    assert read_setting(read("swift", "--beta", "0.0"), "beta") == 0.0


def test_megatron_swift_teacher_becomes_teacher_model_of_the_ranks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    group = ["--n_samples_per_prompt", "2", "--opd_kl_coef", "0.5"]
    theirs = [*group, "--use_opd", "--opd_type", "megatron", "--opd_teacher_load"]
    for cfg in (
        read("slime", *theirs, str(tmp_path)),
        read("slime", *theirs, "/converted", "--teacher_model", str(tmp_path)),
        read("swift", "--teacher_model", str(tmp_path), "--teacher_kl_coef", "0.5"),
    ):
        assert (read_setting(cfg, "teacher_model"), read_setting(cfg, "teacher_kl_coef")) == (str(tmp_path), 0.5)
    assert read_setting(read("slime", *group), "teacher_kl_coef") == 1.0


@pytest.mark.parametrize("dialect", ["trl", "skyrl", "skyrl-doc", "swift", "cs336"])
def test_framework_defaults_table_equals_applied_defaults(dialect):
    """What it says is used is what the configuration holds, and every row differs from ours."""
    sizes = ["--train_batch_size", "16"] if dialect == "cs336" else []
    parsed = parse(["--dialect", dialect, *sizes], dialects=lambda: DIALECTS)
    cfg = check_parsed(parsed).config
    shown = {row.name: row for row in parsed.defaults}
    for row in DIALECTS[dialect].defaults:
        if not row.native:
            assert shown[row.name].used == shown[row.name].ours == row.ours
            continue
        assert {name: read_setting(cfg, name) for name in row.native} == dict(row.native)
        assert any(table()[name].default != value for name, value in row.native.items()), row.name
        assert shown[row.name].used == row.theirs


@pytest.mark.parametrize(
    ("dialect", "words", "said"),
    [
        ("swift", "--loss_type real --rollout_importance_sampling_mode token_mask", "applies to single tokens, but loss_type real"),
        ("swift", "--vllm_mode server --vllm_data_parallel_size 2", "vllm_data_parallel_size (2): several engines per rollout server"),
        ("swift", "--tuner_type lora_llm", "tuner_type cannot be 'lora_llm': it trains a vision tower"),
        ("swift", "--tuner_type lora --modules_to_save embed_tokens", "modules_to_save (embed_tokens): vLLM supports no adapter"),
        ("swift", "--tuner_type lora --lora_bias all", "lora_bias (all): the bias of a frozen weight gets no gradient"),
        ("swift", "--tuner_type lora --init_weights pissa", "init_weights (pissa): A is initialised uniformly and B with zeros"),
        ("swift", "--tuner_type lora --use_dora true", "use_dora (true): its scale needs the norm of the whole merged weight"),
        ("swift", "--adapters a b", "adapters (a b) has 2 adapters. One adapter is trained"),
        ("swift", "--mcore_adapter a", "mcore_adapter (a): adapters in its format are not read"),
        ("swift", "--tuner_type vera --vera_rank 8", "vera_rank (8): LoRA is the only supported adapter"),
        ("swift", "--use_galore true --galore_rank 8", "use_galore (true), galore_rank (8): the trained weights are fixed"),
        ("swift", "--freeze_parameters_ratio 0.5", "freeze_parameters_ratio (0.5): it counts the parameters of one rank"),
        ("swift", "--multi_turn_scheduler math_tip_trick", "(math_tip_trick) is a scheduler registered in Megatron-SWIFT"),
        ("swift", "--gym_env my_env --multi_turn_scheduler gym_scheduler", "(my_env) is an environment registered in Megatron-SWIFT"),
        ("swift", "--completion_length_limit_scope per_round", "max_completion_length is of the whole episode here"),
        ("swift", "--agent_template react", "agent_template (react): tools are shown by the model's own chat template"),
        ("swift", "--external_plugins plugin.py", "external_plugins (plugin.py): only reward functions are loaded"),
        ("swift", "--reward_funcs my_orm --external_plugins plugin.py", "(my_orm) is a reward function of Megatron-SWIFT"),
        ("swift", "--val_dataset a.jsonl b.jsonl", "has 2 data sets"),
        ("swift", "--dataset ms::org/name", "is on another hub"),
        ("swift", "--system /nowhere/prompt.txt", "cannot be read as a text file"),
        ("swift", "--teacher_adapters x", "teacher_adapters (x): distillation: one teacher for all rows"),
        ("swift", "--gkd_logits_topk 8", "a teacher returns the log-prob of each sampled token only"),
        ("swift", "--temperature 1.0 --teacher_model_server [{}]", "'[{}]' is not a URL of the form http://host:8000"),
        ("slime", "--use_opd --opd_type sglang", "SGLang servers are not supported as teachers"),
        ("slime", "--use_opd --opd_type megatron --opd_teacher_load /t", "(/t) is a checkpoint of Megatron-LM"),
        ("swift", "--moe_expert_capacity_factor 2", "a capacity that drops tokens"),
        ("swift", "--fp4_format e2m1", "fp4"),
        ("swift", "--use_gym_env true", "use_gym_env (true) uses rewards of an environment, which is not set"),
        ("swift", "--optimizer muon", "the optimizer is AdamW"),
        ("swift", "--rlhf_type dpo", "only GRPO"),
        ("swift", "--advantage_estimator rloo --scale_rewards group", "divides by a standard deviation"),
        ("swift", "--some_new_flag 1", "It is not a known Megatron-SWIFT name either"),
        ("trl", "--use_peft --use_dora", "use_dora (true): its scale needs the norm"),
        ("trl", "--use_peft --lora_modules_to_save lm_head", "lora_modules_to_save (lm_head): vLLM supports no adapter"),
        ("trl", "--use_peft --lora_target_parameters experts", "adapters are on linear layers"),
        ("trl", "--use_vllm false", "sampling is by vLLM alone"),
        ("skyrl", "--run_engines_locally false", "servers are started beside a run (megatron-grpo serve)"),
        ("trl", "--loss_type vespo --vllm_importance_sampling_mode sequence_mask", "would be counted once per token"),
        ("trl", "--optim adafactor", "the optimizer is AdamW"),
        ("trl", "--deepspeed zero3.json", "Megatron shards"),
        ("trl", "--repetition_penalty 1.1", "training log-probs depend on the logits only"),
        ("trl", "--reward_funcs think_format_reward", "(think_format_reward) is a reward function of TRL"),
        ("trl", "--save_strategy epoch", "intervals of saving and evaluation are in optimizer steps"),
        ("trl", "--metric_for_best_model loss", "(loss) is not a metric of an evaluation here"),
        ("trl", "--load_best_model_at_end true", "requires metric_for_best_model, which selects the checkpoint"),
        ("skyrl", "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.init_method=zero", "(zero): A is initialised uniformly"),
        ("skyrl", "trainer.algorithm.advantage_estimator=gae", "advantage_estimator (gae)"),
        ("skyrl", "trainer.algorithm.policy_loss_type=clip_cov", "policy_loss_type (clip_cov)"),
        ("skyrl", "trainer.algorithm.loss_reduction=prompt_mean", "loss_reduction (prompt_mean)"),
        ("skyrl", "trainer.placement.colocate_all=false", "servers are started beside a run"),
        ("skyrl", "trainer.fully_async.enabled=true", "async_rollout_depth 4 trains on completions of older weights"),
        ("skyrl", "generator.max_turns=4", "multi-turn"),
        ("skyrl", "environment.env_class=gsm8k", "rewards come from reward_funcs"),
        ("skyrl", "trainer.strategy=deepspeed", "trainer.strategy (deepspeed) is not supported. Supported: megatron, fsdp, fsdp2"),
    ],
)  # fmt: skip
def test_unsupported_framework_arguments_are_rejected_by_name_and_feature(dialect, words, said):
    assert said in find_problems(dialect, *words.split())


@pytest.mark.parametrize(
    ("dialect", "words", "values"),
    [
        ("swift", "--rollout_importance_sampling_mode sequence_truncate", {"rollout_is_geometric": True}),
        ("swift", "--rollout_importance_sampling_mode token_truncate", {"rollout_is_geometric": False}),
        ("swift", "--advantage_estimator reinforce_plus_plus", {"advantage_estimator": "reinforce_plus_plus_baseline"}),
        ("swift", "--advantage_estimator reinforce_plus_plus --scale_rewards group", {"advantage_estimator": "grpo"}),
        ("swift", "--loss_type cispo", {"epsilon_high": 0.2}),
        ("swift", "--loss_type cispo --epsilon_high 5", {"epsilon_high": 5.0}),
        ("swift", "--system a\\nb", {"system": "a\nb"}),
        ("swift", "--ddp_timeout 1800", {"distributed_timeout_minutes": 30.0}),
        ("swift", "--train_iters 7", {"max_steps": 7}),
        ("swift", "--streaming true --train_iters 7 --num_train_epochs 1 --shuffle_buffer_size 50 --max_length 9",
         {"streaming": True, "max_steps": 7, "num_train_epochs": None, "shuffle_buffer_size": 50, "max_prompt_length": 9}),
        ("swift", "--shuffle_buffer_size 50", {"shuffle_buffer_size": 1000}),
        ("trl", "--dataset_streaming true --max_steps 7 --max_prompt_length 9", {"streaming": True, "max_steps": 7}),
        ("trl", "--scale_rewards false", {"scale_rewards": "none"}),
        ("trl", "--scale_rewards true", {"scale_rewards": "group"}),
        ("trl", "--scale_rewards batch", {"scale_rewards": "batch"}),
        ("trl", "--max_steps -1", {"max_steps": None, "num_train_epochs": 3.0}),
        ("trl", "--max_steps 5", {"max_steps": 5}),
        ("trl", "", {"loss_type": "dapo", "rollout_importance_sampling_mode": "sequence_mask",
                     "rollout_importance_sampling_threshold": 3.0, "rollout_is_geometric": False, "adam_beta2": 0.999}),
        ("trl", "--vllm_importance_sampling_clip_max 5", {"rollout_importance_sampling_threshold": 5.0}),
        ("trl", "--vllm_importance_sampling_correction false", {"rollout_importance_sampling_mode": "none"}),
        ("trl", "--gradient_checkpointing false", {"recompute_granularity": None}),
        ("trl", "--lr_scheduler_type constant_with_warmup", {"lr_decay_style": "constant"}),
        ("trl", "--max_prompt_length 64", {"truncation_strategy": "left"}),
        ("trl", "--dataset_test_split test", {"eval_dataset": "", "eval_dataset_split": None}),
        ("trl", "--dataset_name a/b --dataset_test_split validation --eval_strategy steps --eval_steps 5",
         {"dataset": "a/b", "eval_dataset": "a/b", "eval_dataset_split": "validation"}),
        ("trl", "--eval_dataset x --dataset_test_split dev", {"eval_dataset": "x", "eval_dataset_split": "dev"}),
        ("trl", "--reward_funcs accuracy_reward pack.age.fn", {"reward_funcs": ["math", "pack.age:fn"]}),
        ("trl", "--reward_funcs get_soft_overlong_punishment",
         {"reward_funcs": ["soft_overlong"], "soft_max_length": 1280, "soft_cache_length": 256}),
        ("skyrl", "trainer.policy.optimizer_config.lr=3e-6 trainer.policy.optimizer_config.adam_betas=[0.8,0.9]",
         {"lr": 3e-6, "adam_beta1": 0.8, "adam_beta2": 0.9}),
        ("skyrl", "trainer.algorithm.eps_clip_low=0.1 trainer.algorithm.eps_clip_high=0.3", {"epsilon": 0.1, "epsilon_high": 0.3}),
        ("skyrl", "", {"beta": 0.001, "kl_in_reward": False, "loss_type": "dapo", "max_completion_length": 1024}),
        ("skyrl", "trainer.algorithm.use_kl_loss=false", {"beta": 0.0}),
        ("skyrl", "trainer.algorithm.use_kl_in_reward=true trainer.algorithm.use_kl_loss=false", {"beta": 0.001, "kl_in_reward": True}),
        ("skyrl", "trainer.algorithm.policy_loss_type=dual_clip", {"loss_type": "dapo", "delta": 3.0}),
        ("skyrl", "trainer.algorithm.policy_loss_type=gspo trainer.algorithm.loss_reduction=sequence_mean",
         {"loss_type": "grpo", "importance_sampling_level": "sequence_token"}),
        ("skyrl", "trainer.algorithm.policy_loss_type=cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("skyrl", "trainer.algorithm.grpo_norm_by_std=false", {"scale_rewards": "none"}),
        ("skyrl", "trainer.algorithm.use_tis=true trainer.algorithm.tis_imp_ratio_cap=3",
         {"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold": 3.0}),
        ("skyrl", "trainer.placement.policy_num_nodes=2 trainer.placement.policy_num_gpus_per_node=4 "
                  "trainer.policy.megatron_config.tensor_model_parallel_size=2",
         {"world_size": 8, "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}),
        ("skyrl", "generator.sampling_params.top_k=-1 generator.sampling_params.temperature=0.7", {"top_k": 0, "temperature": 0.7}),
        ("skyrl", "environment.env_class=gsm8k --reward_funcs math", {"reward_funcs": ["math"]}),
        ("skyrl", "trainer.policy.megatron_config.moe_enable_routing_replay=true "
                  "generator.inference_engine.enable_return_routed_experts=true", {"router_replay_mode": "R3"}),
        ("trl", "--metric_for_best_model eval_reward --greater_is_better false --eval_strategy steps --eval_dataset x --eval_steps 500",
         {"metric_for_best_model": "eval", "greater_is_better": False}),
        ("trl", "--metric_for_best_model eval_reward --reward_funcs accuracy_reward p/a.py:b --eval_strategy steps --eval_dataset x "
                "--eval_steps 500", {"metric_for_best_model": "eval"}),
        ("swift", "--metric_for_best_model rewards/accuracy/mean --val_dataset x --reward_funcs p/a.py:accuracy --eval_steps 500",
         {"metric_for_best_model": "eval/accuracy"}),
        ("swift", "--mcore_model /a --finetune false --no_load_optim true", {"mcore_model": None, "resume": "/a", "no_load_optim": True}),
        ("swift", "--mcore_model /a --no_load_optim true", {"mcore_model": "/a", "resume": "auto", "no_load_optim": False}),
        ("swift", '--columns {"q":"query","a":"solution"}', {"columns": {"q": "prompt", "a": "solution"}}),
        ("swift", "--dataset d.jsonl --interleave_prob 1", {"interleave_prob": []}),
        ("trl", "--warmup_steps 0.1", {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 0}),
        ("trl", "--warmup_steps 7", {"lr_warmup_fraction": None, "lr_warmup_iters": 7}),
        ("trl", "--use_adaptive_entropy true --entropy_target 3", {"use_adaptive_entropy": True, "entropy_target": 3.0}),
        ("trl", "--entropy_target 3", {"use_adaptive_entropy": False, "entropy_target": 0.2}),
        ("swift", "--router_replay_mode R2", {"router_replay_mode": "R2"}),
    ],
)  # fmt: skip
def test_framework_arguments_are_translated_to_native_values(dialect, words, values):
    cfg = read(dialect, *words.split())
    assert {name: read_setting(cfg, name) for name in values} == values


def test_framework_system_prompt_file_is_read(tmp_path):
    (tmp_path / "prompt.txt").write_text("Think first.\n")
    assert read("swift", "--system", str(tmp_path / "prompt.txt")).data.system == "Think first.\n"


def test_native_flags_of_translated_script_give_same_plan(capsys, tmp_path):
    script = tmp_path / "grpo.sh"
    elsewhere = {"rows.jsonl": "someone/rows", "/nowhere/model": "someone/model", "--report_to wandb": ""}  # `plan` looks at what is here
    script.write_text(functools.reduce(lambda text, name: text.replace(name, elsewhere[name]), elsewhere, SWIFT_SCRIPT))
    import shlex

    assert main(["plan", "--json", "--dialect", "swift", "--config", str(script)]) == 0
    there = json.loads(capsys.readouterr().out)
    assert main(["plan", "--json", *shlex.split(there["native_flags"])]) == 0
    here = json.loads(capsys.readouterr().out)
    assert here["native_flags"] == there["native_flags"] and here["timetable"] == there["timetable"]
    assert "--lr_decay_style cosine" in there["native_flags"] and "--beta 0.04" in there["native_flags"]


def test_several_datasets_become_one_native_flag(capsys, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n' * 4)
    words = f"--dialect swift --num_generations 4 --global_batch_size 4 --dataset {tmp_path}/a.jsonl {tmp_path}/b.jsonl"
    assert main(["plan", "--json", *words.split()]) == 0, capsys.readouterr()
    flags = json.loads(capsys.readouterr().out)["native_flags"]
    assert f"--dataset {tmp_path}/a.jsonl {tmp_path}/b.jsonl" in flags and "further_datasets" not in flags


def test_native_flags_include_max_tokens_per_micro_batch(capsys):
    words = "--dialect swift --max_tokens_per_micro_batch 4096 --pad_to_multiple_of 64"
    assert main(["plan", "--json", *words.split()]) == 0
    flags = json.loads(capsys.readouterr().out)["native_flags"]
    assert "--max_tokens_per_micro_batch 4096 --pad_to_multiple_of 64" in flags and "further_datasets" not in flags


@pytest.mark.parametrize(
    ("dialect", "words", "said"),
    [
        ("slime", "--tis_clip_low 0.5 --kl_loss_type k2", ["tis_clip_low has no effect without use_tis", "kl_loss_type has no effect"]),
        ("slime", "--use_tis --tis_clip_low 0.5", []),
        ("verl", "actor_rollout_ref.actor.kl_loss_coef=0.01", ["actor.kl_loss_coef has no effect without actor.use_kl_loss"]),
        ("verl", "actor_rollout_ref.actor.kl_loss_coef=0.001", []),
        ("skyrl", "trainer.policy.model.lora.dropout=0.1", ["lora.dropout has no effect without policy.model.lora.rank"]),
    ],
)  # fmt: skip
def test_framework_arguments_without_effect_are_noted(dialect, words, said):
    notes = [note for note in parse(["--dialect", dialect, *words.split()], dialects=lambda: DIALECTS).notes if "has no effect" in note]
    assert len(notes) == len(said) and all(any(one in note for note in notes) for one in said)


@pytest.mark.parametrize("dialect", ["trl", "skyrl", "swift", "cs336"])
def test_framework_table_rows_give_a_setting_a_reason_or_nothing(dialect):
    for name, row in DIALECTS[dialect].names.items():
        assert not row.native or row.native in table(), name
        assert sum(map(bool, (row.native, row.read, row.lacks))) <= 1, name
    for row in DIALECTS[dialect].defaults:
        assert set(row.native) <= set(table()), row.name


def test_built_in_rewards_are_known_to_frameworks():
    from megatron_grpo.commands.compat.settle import BUILT_IN_REWARDS
    from megatron_grpo.run.rewards.loading import BUILT_IN

    assert set(BUILT_IN_REWARDS) == set(BUILT_IN)


def test_run_config_file_of_framework_run_has_native_names(tmp_path):
    """The recorded file was read again in the dialect, where its translated words mean something else."""
    from megatron_grpo.run.config.write import as_yaml

    cfg = read("swift", "--reward_funcs", "accuracy", "--advantage_estimator", "reinforce_plus_plus")
    (tmp_path / "config.yaml").write_text(as_yaml(cfg))
    again = check(["--config", str(tmp_path / "config.yaml")]).config
    assert again.plan.dialect is None and again.rewards == cfg.rewards and again.grpo == cfg.grpo and again.optimizer == cfg.optimizer


WHERE_METRICS_GO = [
    ("verl", "trainer.logger=['console','wandb']", ["wandb"]),
    ("verl", "trainer.logger=console", ["none"]),
    ("skyrl", "trainer.logger=wandb", ["wandb"]),
    ("slime", "--n_samples_per_prompt 2 --use_wandb --use_tensorboard", ["wandb", "tensorboard"]),
    ("slime", "--n_samples_per_prompt 2", ["none"]),
]


@pytest.mark.parametrize(("dialect", "words", "services"), WHERE_METRICS_GO)
def test_report_to_follows_framework_tracker_argument(dialect, words, services):
    assert parse(["--dialect", dialect, *words.split()], dialects=lambda: DIALECTS).config.run.report_to == services


def test_framework_tracker_unsupported_is_rejected_and_unknown_is_omitted(tmp_path):
    (message,) = [p.message for p in parse(["--dialect", "verl", "trainer.logger=[console,clearml]"], dialects=lambda: DIALECTS).problems]
    assert "(clearml) is not supported. Supported: tensorboard, wandb" in message
    script = tmp_path / "run.sh"
    script.write_text("python main.py trainer.logger=$LOGGER trainer.policy.model.path=m")
    left_open = parse(["--dialect", "skyrl", "--config", str(script)], dialects=lambda: DIALECTS)
    assert (left_open.problems, left_open.config.run.report_to) == ([], ["none"])


def test_skyrl_long_prompts_are_deleted():
    assert read_setting(read("skyrl"), "truncation_strategy") == "delete"
    assert read_setting(read("skyrl", "--truncation_strategy", "raise"), "truncation_strategy") == "raise"


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_gradient_checkpointing_false_of_skyrl_recomputes_nothing(strategy):
    """megatron_worker.py and fsdp_worker.py both read it."""
    strategy = f"trainer.strategy={strategy}"
    assert read_setting(read("skyrl", strategy), "recompute_granularity") == "full"
    off = read("skyrl", strategy, "trainer.gradient_checkpointing=false")
    assert [read_setting(off, f"recompute_{name}") for name in ("granularity", "method", "num_layers")] == [None, None, None]


@pytest.mark.parametrize(
    ("words", "said"),
    [([], True), (["trainer.use_legacy_worker_impl=disable"], False), (["actor.loss_agg_mode=seq-mean-token-mean"], False)],
)
def test_verl_token_mean_of_legacy_workers_is_noted(words, said):
    notes = " ".join(parse(["--dialect", "verl", *words], dialects=lambda: DIALECTS).notes)
    assert ("legacy workers average token-mean over each micro-batch" in notes) == said


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("verl", "data.save_freq"), ("verl", "trainer.max_prompt_length"), ("verl", "actor_rollout_ref.train_batch_size"),
        ("skyrl", "generator.policy.optimizer_config.lr"), ("skyrl", "trainer.sampling_params.top_p"),
        ("skyrl", "generator.train_batch_size"),
    ],
)  # fmt: skip
def test_framework_argument_in_wrong_section_is_rejected(dialect, name):
    messages = [problem.message for problem in parse(["--dialect", dialect, f"{name}=1"], dialects=lambda: DIALECTS).problems]
    assert [message.startswith(f"{name} is not a setting.") for message in messages] == [True]


@pytest.mark.parametrize(("dialect", "system"), [("verl", "verl"), ("skyrl", "skyrl")])
def test_framework_argument_names_are_known_in_their_section(dialect, system):
    from tools.arguments import read_arguments

    names = [name for name in read_arguments(system)[1] if DIALECTS[dialect].knows(name.partition(".")[2])]
    assert [name for name in names if not DIALECTS[dialect].knows(name)] == []


def test_trl_auto_find_batch_size_is_rejected_with_its_reason():
    message = find_problems("trl", "--per_device_train_batch_size", "8", "--auto_find_batch_size", "true")
    assert "batch sizes are not adapted" in message and "save_steps" not in message


def test_megatron_swift_rules_are_reported_for_its_dialect_only(capsys):
    assert main(["plan", "--dialect", "trl", "--per_device_train_batch_size", "8"]) == 0
    assert "Megatron-SWIFT" not in capsys.readouterr().out
    for words in (["--micro_batch_size", "8"], ["--micro_batch_size", "4", "--steps_per_generation", "2", "--tuner_type", "lora"]):
        assert main(["plan", *words]) == 0
        assert "SWIFT" not in capsys.readouterr().out
    assert main(["plan", "--dialect", "swift", "--micro_batch_size", "8"]) == 0
    assert "Megatron-SWIFT rejects" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("slime", ["--multimodal_keys=2"]),
        ("slime", ["--update_weight_buffer_size=512 * 1024 ** 2"]),
        ("trl", ["--lr_scheduler_kwargs=2"]),
        ("trl", ["--model_init_kwargs=2"]),
    ],
)
def test_framework_argument_with_value_of_wrong_form_is_rejected(dialect, words):
    assert words[0].lstrip("-").replace("=", " (") in find_problems(dialect, *words)
