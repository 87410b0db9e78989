"""Scripts of other projects through their dialect: the sizes of their own program, worked out by hand, or one named feature.

Each row has the arguments that decide, not the file. The source of the sizes is beside them, as file and line of that project's code:
ms-swift 3602360, verl b178a3c, slime 624b824, TRL f2cd577.
"""

from __future__ import annotations

import pytest

from megatron_grpo.core.base.errors import ConfigError
from tests.checked import check

# (ranks, data-parallel size, micro batch, global batch, rollout, group)
Sizes = tuple[int, int, int, int, int, int]

# examples/megatron/grpo of ms-swift. dp = world / (tp x pp x cp) and generation_batch_size = global_batch_size x steps_per_generation:
# swift/megatron/arguments/megatron_args.py, _init_generation_batch_params and resolve_generation_batch_size.
SWIFT = {
    "dense_colocate": (
        "--world_size 8 --global_batch_size 128 --micro_batch_size 4 --steps_per_generation 4 --num_generations 8 --overlong_filter true "
        "--vllm_mode colocate --beta 0.001 --offload_model true --offload_bridge false --sleep_level 2 --num_train_epochs 1 "
        "--train_iters 100",
        (8, 8, 4, 128, 512, 8),
    ),
    "dense_server": (
        "--world_size 6 --global_batch_size 96 --micro_batch_size 4 --steps_per_generation 4 --num_generations 8 --vllm_mode server "
        "--vllm_server_host 127.0.0.1 --vllm_server_port 8000 --sleep_level 2",
        (6, 6, 4, 96, 384, 8),
    ),
    "moe_colocate_full": (
        "--world_size 8 --tensor_model_parallel_size 4 --expert_model_parallel_size 4 --pipeline_model_parallel_size 2 "
        "--global_batch_size 8 "
        "--micro_batch_size 1 --steps_per_generation 1 --num_generations 8 --vllm_tensor_parallel_size 8 --sequence_parallel true "
        "--importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4",
        (8, 1, 1, 8, 8, 8),
    ),
    "moe_colocate_lora": (
        "--world_size 8 --context_parallel_size 2 --tensor_model_parallel_size 2 --expert_model_parallel_size 4 --sequence_parallel true "
        "--pipeline_model_parallel_size 2 --global_batch_size 64 --micro_batch_size 2 --steps_per_generation 2 --num_generations 8 "
        "--tuner_type lora --merge_lora false --vllm_tensor_parallel_size 4",
        (8, 1, 2, 64, 128, 8),
    ),
    "sapo": (
        "--world_size 8 --loss_type sapo --tau_pos 1 --tau_neg 1.05 --steps_per_generation 4 --micro_batch_size 2 --global_batch_size 128 "
        "--num_generations 8",
        (8, 8, 2, 128, 512, 8),
    ),
    "opd_rl": (
        "--world_size 2 --tensor_model_parallel_size 2 --sequence_parallel true --global_batch_size 16 --micro_batch_size 2 "
        "--steps_per_generation 2 --num_generations 1 --teacher_model Qwen/Qwen3.5-9B --temperature 1 --beta 0",
        (2, 1, 2, 16, 32, 1),
    ),
    "dense_colocate, its reward": (
        "--reward_funcs external_r1v_acc format --external_plugins examples/train/grpo/plugin/plugin.py",
        "(external_r1v_acc) is a reward function of Megatron-SWIFT or of a plugin",
    ),
    "multi_turn/frozen_lake": (
        "--gym_env frozen_lake --multi_turn_scheduler gym_scheduler --use_gym_env true "
        "--external_plugins examples/megatron/grpo/multi_turn/frozen_lake_plugin.py",
        "(frozen_lake) is an environment registered in Megatron-SWIFT",
    ),
    "multi_turn/frozen_lake_server": (
        "--external_plugins frozen_lake_plugin.py",
        "(frozen_lake_plugin.py): only reward functions",
    ),
    "rlhf/dpo/dense": ("--rlhf_type dpo", "only GRPO on causal language models"),
    "rlhf/gkd/dense": ("--rlhf_type gkd", "only GRPO on causal language models"),
}

# examples/grpo_trainer of verl. A mini-batch is ppo_mini_batch_size x n completions (megatron_workers.py:354, fsdp_workers.py:241), dp is
# Megatron's (megatron_workers.py:355) or ranks / ulysses (fsdp_workers.py:242); a rollout is train_batch_size x n (ray_trainer.py, repeat).
SCRIPT = "actor_rollout_ref.actor.ppo_mini_batch_size={mini} data.train_batch_size={train} actor_rollout_ref.rollout.n={n} "
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="
KWARGS = "trainer.policy.megatron_config.optimizer_config_kwargs."
ACTOR = "actor_rollout_ref.actor."
VERL = {
    "run_qwen2-7b": (SCRIPT.format(mini=256, train=1024, n=5) + f"{MICRO}40 trainer.n_gpus_per_node=8", (8, 8, 40, 1280, 5120, 5)),
    "run_qwen3-8b": (SCRIPT.format(mini=256, train=1024, n=5) + f"{MICRO}32 trainer.nnodes=1", (8, 8, 32, 1280, 5120, 5)),
    "run_qwen2_5_32b_grpo_npu": (SCRIPT.format(mini=128, train=1024, n=5) + f"{MICRO}2 trainer.nnodes=2 trainer.n_gpus_per_node=16",
                                 (32, 32, 2, 640, 5120, 5)),
    "run_qwen2_5-3b_gsm8k_grpo_lora": (SCRIPT.format(mini=16, train=16, n=5) + f"{MICRO}40 trainer.n_gpus_per_node=2 "
                                       "actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32",
                                       (2, 2, 40, 80, 80, 5)),
    "run_qwen2-7b_math_megatron": (SCRIPT.format(mini=256, train=1024, n=5) + f"{MICRO}4 {ACTOR}megatron.pipeline_model_parallel_size=2 "
                                   f"{ACTOR}megatron.tensor_model_parallel_size=2 "
                                   f"actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
                                   (8, 2, 4, 1280, 5120, 5)),
    # use_dynamic_bsz: ppo_micro_batch_size_per_gpu is not read (megatron_actor.py:436)
    "run_qwen2_5_vl-7b-megatron": (SCRIPT.format(mini=128, train=512, n=5) + f"{MICRO}4 {ACTOR}megatron.tensor_model_parallel_size=2 "
                                   f"{ACTOR}use_dynamic_bsz=True {ACTOR}ppo_max_token_len_per_gpu=5120", (8, 4, 1, 640, 2560, 5)),
    "run_qwen3moe-30b_megatron_lora": (SCRIPT.format(mini=16, train=128, n=4) + f"{MICRO}2 {ACTOR}megatron.tensor_model_parallel_size=2 "
                                       f"{ACTOR}megatron.pipeline_model_parallel_size=2 {ACTOR}megatron.context_parallel_size=2 "
                                       f"{ACTOR}megatron.expert_model_parallel_size=4 {ACTOR}megatron.expert_tensor_parallel_size=1 "
                                       f"{ACTOR}use_dynamic_bsz=True actor_rollout_ref.model.lora.rank=32 "
                                       "actor_rollout_ref.model.lora.lora_A_init_method=kaiming", (8, 1, 1, 64, 512, 4)),
    "run_deepseek671b_math_megatron_80gb": (SCRIPT.format(mini=128, train=512, n=4) + f"{MICRO}1 trainer.nnodes=32 "
                                                                                      f"{ACTOR}use_dynamic_bsz=True "
                                            f"{ACTOR}megatron.pipeline_model_parallel_size=16 "
                                            f"{ACTOR}megatron.expert_model_parallel_size=16 "
                                            f"{ACTOR}megatron.expert_tensor_parallel_size=1 {ACTOR}ppo_max_token_len_per_gpu=6144",
                                            (256, 16, 1, 512, 2048, 4)),
    "run_qwen2-7b_seq_balance": ("actor_rollout_ref.rollout.name=sglang", "sampling is by vLLM alone"),
    "run_mistral13b_skyworkrm_hhrlhf": ("reward_model.enable=True", "a reward model is the reward function reward_model"),
    "run_qwen2-32b_sglang_fsdp_npu": ("custom_reward_function.path=recipe/r1_ascend/deepscaler.py", "is a function with verl's signature"),
}  # fmt: skip

# scripts of slime. global_batch_size counts samples, or is rollout_batch_size x n_samples_per_prompt // num_steps_per_rollout
# (slime/utils/arguments.py, slime_validate_args); the world is actor_num_nodes x actor_num_gpus_per_node
# (backends/megatron_utils/arguments.py, megatron_parse_args); a micro-batch holds max_tokens_per_gpu x cp tokens
# (utils/dp_schedule.py:120).
DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu"
SLIME = {
    "run-qwen3-4B": ("--actor-num-gpus-per-node 8 --colocate --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
                     f"--tensor-model-parallel-size 2 --sequence-parallel {DYNAMIC} 9216 --recompute-granularity full "
                     f"--recompute-method uniform "
                     "--recompute-num-layers 1", (8, 4, 1, 256, 256, 8)),
    "run-glm4-9B": ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-batch-size 32 --n-samples-per-prompt 8 "
                    "--global-batch-size 256 "
                    f"--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 {DYNAMIC} 4608", (4, 1, 1, 256, 256, 8)),
    "run-qwen3-30B-A3B": ("--actor-num-gpus-per-node 8 --colocate --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
                          "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 "
                          "--expert-tensor-parallel-size 1 "
                          f"{DYNAMIC} 20480", (8, 2, 1, 256, 256, 8)),
    "run-deepseek-r1": ("--actor-num-nodes 16 --rollout-batch-size 128 --n-samples-per-prompt 8 --num-steps-per-rollout 4 "
                        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 4 "
                        "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --decoder-last-pipeline-num-layers 13 "
                        f"--micro-batch-size 1 {DYNAMIC} 16384", (128, 1, 1, 256, 1024, 8)),
    "run-mimo-7B-rl-eagle": ("--mtp-num-layers 1 --enable-mtp-training", "multi-token prediction heads are not trained"),
    "run-qwen3-4B, its judge": ("--rm-type deepscaler", "(deepscaler) is a reward model of slime"),
    "run-qwen3-4B-base-sft": ("--loss-type sft_loss", "only GRPO on causal language models"),
    "run-glm5-744B-A40B": ("--allgather-cp", "context parallelism is zigzag"),
}  # fmt: skip

# examples/scripts of TRL, as their first lines start them: generation = per_device x ranks x steps_per_generation, which is by default
# gradient_accumulation_steps (trl/trainer/grpo_config.py, __post_init__).
TRL = {
    "grpo_agent": ("--use_vllm True --vllm_mode colocate --max_completion_length 1024 --log_completions True --max_steps 400",
                   (1, 1, 8, 8, 8, 8)),
    "grpo_vlm": ("--world_size 8 --learning_rate 1e-5 --dtype bfloat16 --max_completion_length 1024 --use_vllm --vllm_mode colocate "
                 "--use_peft "
                 "--lora_target_modules q_proj v_proj --log_completions", (8, 8, 8, 64, 64, 8)),
    "grpo_vlm, SmolVLM2": ("--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --num_generations 2 --use_peft",
                           (1, 1, 1, 2, 2, 2)),
    "grpo_continuous_batching": ("--num_generations 32 --per_device_train_batch_size 32 --use_peft "
                                 "--log_completions", (1, 1, 32, 32, 32, 32)),
    "grpo_continuous_batching, its engine": ("--use_transformers_continuous_batching", "sampling is by vLLM alone"),
    "grpo_vlm, its reward": ("--reward_funcs think_format_reward accuracy_reward", "(think_format_reward) is a reward function of TRL"),
}  # fmt: skip

# examples of SkyRL: dp = ranks / (tp x pp x cp) with megatron, ranks / sequence_parallel_size with fsdp; both batches are counted in
# prompts and multiplied by n_samples_per_prompt (skyrl/train/utils/utils.py, validate_batch_sizes, lines 85 to 128).
PROMPTS = "trainer.train_batch_size={train} trainer.policy_mini_batch_size={mini} generator.n_samples_per_prompt={n} "
EACH, GPUS = "trainer.micro_train_batch_size_per_gpu=", "trainer.placement.policy_num_gpus_per_node="
FULL, MEGATRON = "trainer.strategy=fsdp ", "trainer.strategy=megatron trainer.policy.megatron_config."
SKYRL = {
    "gsm8k/run_gsm8k": (PROMPTS.format(train=1024, mini=256, n=5) + f"{FULL}{EACH}64 {GPUS}4", (4, 4, 64, 1280, 5120, 5)),
    "gspo/run_gspo_gsm8k": (PROMPTS.format(train=1024, mini=256, n=5) + f"{FULL}{EACH}16 {GPUS}4 trainer.algorithm.policy_loss_type=gspo "
                            "trainer.algorithm.loss_reduction=sequence_mean", (4, 4, 16, 1280, 5120, 5)),
    "gsm8k/run_32b_gsm8k": (PROMPTS.format(train=32, mini=32, n=4) + f"{FULL}{EACH}8 {GPUS}16", (16, 16, 8, 128, 128, 4)),
    "dapo, Ulysses": (PROMPTS.format(train=512, mini=32, n=16) + f"{FULL}{EACH}8 {GPUS}8 trainer.policy.sequence_parallel_size=4",
                      (8, 2, 8, 512, 8192, 16)),
    "megatron/run_megatron": (PROMPTS.format(train=128, mini=64, n=5) + f"{EACH}4 {GPUS}4 {MEGATRON}tensor_model_parallel_size=2 "
                              "trainer.policy.megatron_config.pipeline_model_parallel_size=2", (4, 1, 4, 320, 640, 5)),
    "megatron/run_megatron_dapo_qwen3_30b_a3b": (
        PROMPTS.format(train=512, mini=32, n=16) + f"{EACH}2 {GPUS}8 trainer.placement.policy_num_nodes=2 "
        f"{MEGATRON}tensor_model_parallel_size=4 trainer.policy.megatron_config.expert_model_parallel_size=8 "
        "trainer.policy.megatron_config.expert_tensor_parallel_size=1 generator.inference_engine.engine_init_kwargs.max_model_len=12000 "
        "trainer.algorithm.overlong_buffer_len=512 trainer.algorithm.overlong_buffer_penalty_factor=1.0 --reward_funcs math",
        (16, 4, 2, 512, 8192, 16)),
    "clip_cov": ("trainer.algorithm.policy_loss_type=clip_cov", "(clip_cov) with algorithm.loss_reduction (token_mean) is not supported"),
    "fully_async": ("trainer.fully_async.enabled=true trainer.placement.colocate_all=false", "servers are started beside a run"),
}  # fmt: skip
# More of verl: examples/tuning and verl/experimental.
VERL |= {
    # actor.ppo_micro_batch_size //= ranks / ulysses (fsdp_workers.py:249), or the data-parallel size (megatron_workers.py:357)
    "tuning/70b/qwen2-72b_grpo-lora_8_h100": (
        SCRIPT.format(mini=176, train=176, n=5) + f"{ACTOR}ppo_micro_batch_size=176 {ACTOR}ulysses_sequence_parallel_size=2 "
        "trainer.n_gpus_per_node=8", (8, 4, 44, 880, 880, 5)),
    "tuning/32b/qwen2_32B_grpo_8_h20_megatron": (SCRIPT.format(mini=256, train=512, n=5) + f"{MICRO}1 trainer.n_gpus_per_node=8 "
                                                 f"{ACTOR}megatron.tensor_model_parallel_size=8", (8, 1, 1, 1280, 2560, 5)),
    "router_replay/run_qwen30_a3b_megatron": (
        SCRIPT.format(mini=8, train=8, n=8) + f"{MICRO}1 {ACTOR}megatron.tensor_model_parallel_size=2 "
        f"{ACTOR}megatron.expert_model_parallel_size=8 {ACTOR}megatron.expert_tensor_parallel_size=1", (8, 4, 1, 64, 64, 8)),
    "special_npu/run_qwen2_5_05b_grpo": (
        SCRIPT.format(mini=8, train=16, n=2) + f"{MICRO}1 data.gen_batch_size=16 actor_rollout_ref.model.lora.rank=0 "
        "actor_rollout_ref.model.lora.alpha=0 actor_rollout_ref.actor.optim.lr_decay_steps=100 "
        "algorithm.rollout_correction.rollout_is_threshold=null "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_AND_PIECEWISE", (8, 8, 1, 16, 32, 2)),
    "ppo_trainer": ("algorithm.adv_estimator=gae critic.enable=True actor_rollout_ref.rollout.n=1", "there is no critic"),
    "fully_async": ("async_training.partial_rollout=True data.train_batch_size=0 rollout.nnodes=2", "give the depth as async_rollout"),
    "one_step_off": ("rollout.nnodes=1 rollout.n_gpus_per_node=2", "sampling on separate GPUs is vllm_mode server"),
}  # fmt: skip
CASES = [
    pytest.param(dialect, words, outcome, id=f"{dialect}-{name}")
    for dialect, scripts in (("swift", SWIFT), ("verl", VERL), ("slime", SLIME), ("skyrl", SKYRL), ("trl", TRL))
    for name, (words, outcome) in scripts.items()
]


@pytest.mark.parametrize(("dialect", "words", "outcome"), CASES)
def test_external_script_has_sizes_of_its_framework_or_is_rejected_by_one_feature(dialect, words, outcome):
    argv = ["--dialect", dialect, *words.split()]
    if isinstance(outcome, str):
        with pytest.raises(ConfigError) as error:
            check(argv)
        about = [problem.message for problem in error.value.problems]
        assert sum(outcome in message for message in about) == 1, about
        return
    sizes = check(argv).sizes
    found = (sizes.layout.world_size, sizes.dp_size, sizes.micro_batch_size, sizes.global_batch_size, sizes.generation_batch_size,
             sizes.num_generations)  # fmt: skip
    assert found == outcome


@pytest.mark.parametrize(
    ("dialect", "words", "values"),
    [
        # verl: core_algos.py, compute_policy_loss_vanilla (clip_ratio_low/high, dual clip at clip_ratio_c) and agg_loss
        ("verl", "", dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.2, delta=3.0, beta=0.0, max_completion_length=512)),
        ("verl", f"{ACTOR}clip_ratio_low=0.1 {ACTOR}clip_ratio_high=0.28 "
                 f"{ACTOR}clip_ratio_c=10", dict(epsilon=0.1, epsilon_high=0.28, delta=10.0)),
        ("verl", f"{ACTOR}loss_agg_mode=seq-mean-token-mean", dict(loss_type="grpo", delta=3.0)),
        ("verl", f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", dict(loss_type="dr_grpo")),
        # compute_policy_loss_gspo averages by sequence whatever loss_agg_mode says, and has no dual clip
        ("verl", f"{ACTOR}policy_loss.loss_mode=gspo", dict(loss_type="grpo", importance_sampling_level="sequence_token", delta=None)),
        # compute_policy_loss_cispo: clamp(ratio, 1 - low, 1 + high)
        ("verl", f"{ACTOR}policy_loss.loss_mode=cispo {ACTOR}clip_ratio_low=1 "
                 f"{ACTOR}clip_ratio_high=4", dict(loss_type="cispo", epsilon_high=5.0)),
        ("verl", f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.01", dict(beta=0.01, kl_estimator="k3", kl_in_reward=False)),
        ("verl", f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.0", dict(beta=0.0)),
        ("verl", "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05", dict(beta=0.05, kl_in_reward=True)),
        ("verl", "algorithm.norm_adv_by_std_in_grpo=False", dict(scale_rewards="none")),
        ("verl", "algorithm.rollout_correction.rollout_is=token", dict(rollout_importance_sampling_mode="token_truncate")),
        # ray_trainer.py: global_steps counts rollouts, here of 1024 / 256 = 4 optimizer steps
        ("verl", "trainer.total_training_steps=10 trainer.save_freq=5 actor_rollout_ref.actor.optim.lr_warmup_steps=2",
         dict(max_steps=40, save_steps=20, lr_warmup_iters=8)),
        ("verl", "data.filter_overlong_prompts=True data.truncation=error", dict(truncation_strategy="delete")),
        # megatron_actor.py:223 and dp_actor.py:549: ppo_max_token_len_per_gpu times the ranks that share a sequence
        ("verl", f"{ACTOR}use_dynamic_bsz=True {ACTOR}ppo_max_token_len_per_gpu=4096 {ACTOR}megatron.context_parallel_size=2",
         dict(max_tokens_per_micro_batch=8192)),
        ("verl", f"{ACTOR}fsdp_config.param_offload=True {ACTOR}ulysses_sequence_parallel_size=2",
         dict(offload_model="true", context_parallel_size=2, recompute_granularity="full")),
        ("verl", f"{ACTOR}megatron.tensor_model_parallel_size=2",
         dict(sequence_parallel=True, expert_tensor_parallel_size=2, recompute_granularity=None)),
        ("verl", "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex",
         dict(moe_token_dispatcher_type="alltoall")),
        ("verl", "data.trust_remote_code=True actor_rollout_ref.model.trust_remote_code=False", dict(trust_remote_code=True)),
        ("verl", "actor_rollout_ref.model.trust_remote_code=False", dict(trust_remote_code=False)),
        ("trl", "--trust_remote_code", dict(trust_remote_code=True)),
        ("trl", "--model_init_kwargs.trust_remote_code true", dict(trust_remote_code=True)),
        # slime: utils/ppo_utils.py (compute_policy_loss, compute_cispo_loss, compute_opsm_mask), megatron_utils/loss.py
        # (vanilla_tis_function)
        ("slime", "--eps-clip 0.2 --eps-clip-high 0.28", dict(loss_type="grpo", epsilon=0.2, epsilon_high=0.28, delta=None)),
        ("slime", "--calculate-per-token-loss --eps-clip-c 3", dict(loss_type="dapo", delta=3.0)),
        ("slime", "--advantage-estimator gspo", dict(loss_type="grpo", importance_sampling_level="sequence")),
        ("slime", "--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl", dict(beta=0.01, kl_estimator="k3")),
        ("slime", "--use-kl-loss --kl-loss-coef 0.00", dict(beta=0.0)),
        ("slime", "--use-tis --tis-clip 1.5 --tis-clip-low 0.5", dict(rollout_importance_sampling_mode="token_truncate",
         rollout_importance_sampling_threshold=1.5, rollout_importance_sampling_min=0.5)),
        ("slime", "--use-opsm --opsm-delta 0.1", dict(off_policy_sequence_mask_delta=0.1)),
        ("slime", "--disable-grpo-std-normalization", dict(scale_rewards="none")),
        ("slime", "--num-rollout 100 --save-interval 20 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 128",
         dict(max_steps=200, save_steps=40)),
        ("slime", f"{DYNAMIC} 4608 --context-parallel-size 2 --micro-batch-size 4", dict(max_tokens_per_micro_batch=9216)),
        ("slime", "", dict(seed=1234, lr_decay_style="linear", dataset_shuffle=False, adam_beta2=0.999)),
        ("slime", '--multimodal-keys {"image":"pictures"}', dict(columns={"pictures": "images"})),
        ("trl", "--lr_scheduler_type cosine_with_min_lr --learning_rate 2e-5 --lr_scheduler_kwargs.min_lr_rate 0.5",
         dict(lr_decay_style="cosine", min_lr=1e-5)),
        ("trl", "--save_strategy no", dict(save_steps=0)),
        ("trl", '--model_init_kwargs {"dtype":"float32","attn_implementation":"sdpa"}', dict(torch_dtype="float32")),
        ("trl", "--eval_dataset a.jsonl --eval_strategy steps --logging_steps 3 --eval_on_start False", dict(eval_steps=3)),
        ("trl", "--train_sampling_strategy sequential", dict(dataset_shuffle=True)),  # its sampler is GRPOTrainer's own
        ("swift", "--val_dataset a.jsonl --save_steps 7", dict(eval_steps=7)),
        ("swift", "--weight_decay_incr_style linear --start_weight_decay 0.01 --end_weight_decay 0.1", dict(weight_decay=0.0)),
        ("swift", "--lr_decay_style constant --lr_decay_iters 7 --lr_wsd_decay_iters 3",
         dict(lr_decay_iters=None, lr_wsd_decay_iters=None)),
        ("slime", "--rollout-seed 7", dict(seed=7)),
        ("slime", "--rollout-seed 7 --seed 8", dict(seed=8)),
        ("slime", "--offload", dict(offload_model="true", sleep_level=2)),
        ("skyrl", "data.val_data=a.jsonl", dict(eval_steps=20)),
        ("skyrl", "trainer.policy.model.path=x trainer.ref.model.path=x generator.sampling_params.temperature=0.7 "
         "trainer.algorithm.temperature=0.70", dict(model="x", temperature=0.7)),
        ("verl", "data.image_key=images", dict(freeze_vit=False, freeze_aligner=False)),
        ("verl", "data.image_key=images actor_rollout_ref.actor.freeze_vision_tower=True", dict(freeze_vit=True, freeze_aligner=True)),
        ("verl", "data.image_key=images actor_rollout_ref.model.lora_rank=8", dict(freeze_vit=True)),
        # its model is an AutoModelForImageTextToText, or has `model.visual`, and nothing takes requires_grad away
        ("slime", '--multimodal-keys {"image":"pictures"}', dict(freeze_vit=False, freeze_aligner=False)),
        ("skyrl", "generator.vision_language_generator=true", dict(freeze_vit=False, freeze_aligner=False)),
        ("skyrl", "generator.vision_language_generator=true trainer.policy.model.lora.rank=8", dict(freeze_vit=True)),
        ("skyrl", "trainer.policy.language_model_only=true generator.inference_engine.language_model_only=true",
         dict(freeze_vit=True, freeze_aligner=True)),
        ("verl", f"{ACTOR}optim.override_optimizer_config.use_precision_aware_optimizer=True "
         f"+{ACTOR}optim.override_optimizer_config.exp_avg_dtype=torch.bfloat16 "
         f"+{ACTOR}optim.override_optimizer_config.exp_avg_sq_dtype=bf16 +{ACTOR}optim.override_optimizer_config.main_grads_dtype=float32",
         dict(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", main_grads_dtype="fp32")),
        # distributed/megatron/optimizer_dtype.py of SkyRL: whatever the case, and fp8 is uint8
        ("skyrl", f"{KWARGS}use_precision_aware_optimizer=true {KWARGS}exp_avg_dtype=UINT8 {KWARGS}exp_avg_sq_dtype=half "
         f"{KWARGS}main_params_dtype=Float16 {KWARGS}main_grads_dtype=BFloat16",
         dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16", main_params_dtype="fp16", main_grads_dtype="bf16")),
        # what the sentence of a refusal says, typed
        ("skyrl", "generator.max_turns=6 generator.max_input_length=4096 --environment env.py:Search",
         dict(max_turns=6, environment="env.py:Search")),
        ("skyrl", "trainer.placement.colocate_all=false generator.inference_engine.run_engines_locally=false --vllm_mode server "
         "--vllm_server_host 127.0.0.1", dict(vllm_mode="server")),
        ("verl", "rollout.nnodes=1 rollout.n_gpus_per_node=2 --vllm_mode server --vllm_server_host 127.0.0.1", dict(vllm_mode="server")),
        ("verl", "algorithm.adv_estimator=reinforce_plus_plus --advantage_estimator reinforce_plus_plus",
         dict(advantage_estimator="reinforce_plus_plus")),
        # ppo_utils.py:1203 of SkyRL: advantages over mini-batch times max_seq_len
        ("skyrl", "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm trainer.algorithm.max_seq_len=1024", dict(loss_type="dr_grpo")),
        ("verl", "data.apply_chat_template_kwargs.reasoning_effort=medium trainer.resume_from_path=checkpoints/",
         dict(chat_template_kwargs={"reasoning_effort": "medium"}, enable_thinking=None, resume="auto")),
        ("skyrl", "generator.chat_template_kwargs={reasoning_effort:'low'}", dict(chat_template_kwargs={"reasoning_effort": "low"})),
        ("verl", 'data.apply_chat_template_kwargs={"a":1}', dict(chat_template_kwargs={"a": 1})),
        ("skyrl", "generator.chat_template_kwargs.low_effort=true generator.chat_template_kwargs.enable_thinking=false",
         dict(chat_template_kwargs={"low_effort": True}, enable_thinking=False)),
        # engine words of vLLM
        ("verl", "actor_rollout_ref.rollout.engine_kwargs.vllm={max_model_len:4096,disable_custom_all_reduce:true}",
         dict(vllm_max_model_len=4096, vllm_engine_kwargs={"disable_custom_all_reduce": True})),
        ("skyrl", "generator.inference_engine.engine_init_kwargs.compilation_config.cudagraph_mode=NONE",
         dict(vllm_engine_kwargs={"compilation_config": {"cudagraph_mode": "NONE"}})),
        # evaluation: by the sampling of training (TRL _generate, Megatron-SWIFT request_config), or greedy and then once
        ("trl", "--eval_dataset a.jsonl --temperature 0.7 --num_generations 4", dict(eval_temperature=0.7, num_generations_eval=4)),
        ("trl", "--eval_dataset a.jsonl --num_generations_eval 2", dict(eval_temperature=1.0, num_generations_eval=2)),
        ("swift", "--val_dataset a.jsonl", dict(eval_temperature=0.9, num_generations_eval=8)),
        ("skyrl", "data.val_data=a.jsonl generator.eval_n_samples_per_prompt=32", dict(eval_temperature=0.0, num_generations_eval=1)),
        # SkyRL: global_step of skyrl/train/trainer.py counts train batches
        ("skyrl", "trainer.max_training_steps=10 trainer.ckpt_interval=5", dict(max_steps=40, save_steps=20)),
    ],
)  # fmt: skip
def test_external_script_arguments_have_equivalent_native_values(dialect, words, values):
    from megatron_grpo.commands.compat import DIALECTS
    from megatron_grpo.run.config import parse, table

    parsed = parse(["--dialect", dialect, *words.split()], dialects=lambda: DIALECTS)
    assert not parsed.problems, parsed.problems
    assert {name: getattr(getattr(parsed.config, table()[name].group), name) for name in values} == values


@pytest.mark.parametrize(
    ("dialect", "words", "said"),
    [
        ("verl", f"{ACTOR}policy_loss.loss_mode=clip_cov", "loss_mode (clip_cov) is not supported. Supported: vanilla, gspo, sapo, cispo"),
        ("verl", f"{ACTOR}policy_loss.loss_mode=cispo", "Use clip_ratio_low 1 and loss_agg_mode token-mean"),
        ("verl", "algorithm.adv_estimator=gae", "adv_estimator (gae): there is no critic"),
        ("verl", f"{ACTOR}ppo_micro_batch_size=4", "divided by the data-parallel size, which is larger (8)"),
        ("verl", "data.gen_batch_size=2048", "Set it as train_batch_size, and omit gen_batch_size"),
        ("skyrl", "generator.max_input_length=1024", "With one turn both are the same, in SkyRL too"),
        ("skyrl", "trainer.policy.sequence_parallel_size=2 trainer.strategy=megatron", "only with FSDP, in SkyRL too"),
        ("skyrl", "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm trainer.algorithm.max_seq_len=1536",
         "divides by algorithm.max_seq_len (1536), and dr_grpo by max_completion_length (1024). Use algorithm.max_seq_len 1024"),
        ("skyrl", f"{KWARGS}exp_avg_dtype=int8", "exp_avg_dtype cannot be 'int8'"),
        ("skyrl", "trainer.placement.colocate_all=false --vllm_mode colocate", "named with vllm_mode server"),
        ("slime", "--debug-rollout-only", "`eval` samples without training"),
        ("slime", '--train-env-vars {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG":"1"}', "simulates INT4 weights in training"),
        ("verl", "actor_rollout_ref.model.lora.freeze_language_model=False", "what has no adapter does not train"),
        ("verl", "algorithm.adv_estimator=reinforce_plus_plus", "verl whitens over tokens"),
        ("skyrl", "generator.eval_sampling_params.stop=['a']", "differs from sampling_params.stop"),
        ("slime", '--multimodal-keys {"audio":"sound"}', "(audio): images are the only supported modality"),
        ("slime", "--prompt-data a.jsonl@[0:16]", "selects a part of a file"),
        ("slime", "--eval-prompt-data a a.jsonl@[0:16]", "selects a part of a file"),
        ("skyrl", "trainer.policy.model.path=x trainer.ref.model.path=y", "ref.model.path (y) differs from policy.model.path (x)"),
        ("skyrl", "trainer.algorithm.temperature=0.7", "differs from sampling_params.temperature (1.0)"),
        ("trl", '--model_init_kwargs {"revision":"x"}', "model_init_kwargs (revision)"),
        ("verl", "trainer.resume_mode=resume_path trainer.resume_from_path=x", "resume_from_path (x): checkpoints of another system"),
        ("verl", "~data.train_files", "removes a name from a configuration file of that system"),
        ("trl", "--save_steps 0.05", "save_steps (0.05) is a share of the run in TRL"),
        ("trl", '--lr_scheduler_kwargs {"num_cycles":2}', "lr_scheduler_kwargs (num_cycles) of linear"),
        ("verl", f"{ACTOR}some_new_name=1", "It is not a known verl name either"),
        ("slime", "--advantage-estimator ppo", "advantage_estimator (ppo) is not supported"),
        ("slime", "--rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 3", "num_steps_per_rollout (3) does not "
                                                                                                "divide"),
        ("slime", "--rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 2 --global-batch-size 256",
         "global_batch_size (256) is not 32 x 8 / num_steps_per_rollout (2) = 128"),
        ("slime", "--use-dynamic-batch-size", "requires max_tokens_per_gpu"),
        ("slime", "--partial-rollout", "give the depth as async_rollout_depth N"),
    ],
)  # fmt: skip
def test_external_script_with_unsupported_argument_is_rejected(dialect, words, said):
    with pytest.raises(ConfigError) as error:
        check(["--dialect", dialect, *words.split()])
    assert any(said in problem.message for problem in error.value.problems), [problem.message for problem in error.value.problems]


def test_external_script_error_does_not_repeat_a_secret(capsys):
    from megatron_grpo.cli import main

    main(["plan", "--dialect", "slime", "--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--wandb-key", "s3cr3t"])
    said = capsys.readouterr()
    assert "wandb_key" in said.out and "s3cr3t" not in said.out + said.err


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("swift", "--rlhf_type dpo --loss_type sigmoid --rpo_alpha 0.1 --global_batch_size 4 --moe_aux_loss_coeff 1e-3"),
        ("swift", "--use_ray true --group_name x"),
        ("slime", "--loss-type sft_loss --n-samples-per-prompt 1 --no-such-name 3"),
        ("verl", "algorithm.adv_estimator=gae data.truncation=middle actor_rollout_ref.rollout.n=1"),
    ],
)
def test_external_script_of_another_task_gives_one_problem(dialect, words):
    with pytest.raises(ConfigError) as error:
        check(["--dialect", dialect, *words.split()])
    assert len(error.value.problems) == 1


def test_external_script_arguments_read_together_are_rejected_together():
    """Each used to hide the next: one refusal a run."""
    words = ["--dialect", "verl", f"{ACTOR}policy_loss.loss_mode=clip_cov", "algorithm.adv_estimator=remax", "data.truncation=middle"]
    with pytest.raises(ConfigError) as error:
        check([*words, "actor_rollout_ref.rollout.n=2"])
    assert len(error.value.problems) == 3


def test_external_script_with_unknown_names_gives_one_problem(capsys):
    with pytest.raises(ConfigError) as error:
        check(["--dialect", "skyrl", "harbor.zzqa=1", "harbor.zzqb=2"])
    (problem,) = error.value.problems
    assert problem.message.startswith("harbor.zzqa, harbor.zzqb are neither settings nor known SkyRL names")


def test_external_script_with_quantization_variable_is_rejected(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        """RUNTIME_ENV_JSON="{ \\"env_vars\\": { \\"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\\": \\"1\\" } }"
ray job submit --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py --rollout-batch-size 2 --n-samples-per-prompt 4 --rm-type math
"""
    )
    with pytest.raises(ConfigError) as error:
        check(["--dialect", "slime", "--config", str(script)])
    assert any("OPEN_TRAINING_INT4_FAKE_QAT_FLAG" in problem.message for problem in error.value.problems)


@pytest.mark.parametrize(
    ("dialect", "start", "refused", "instead"),
    [
        ("verl", "python3 -m verl.trainer.main_ppo rollout.n=4 algorithm.adv_estimator=grpo",
         "actor_rollout_ref.rollout.name=sglang actor_rollout_ref.model.override_config.max_position_embeddings=32768",
         "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.override_config.max_position_embeddings=none"),
        ("skyrl", "python -m skyrl.train.entrypoints.main_base trainer.algorithm.advantage_estimator=grpo",
         "generator.max_turns=4", "generator.max_turns=1"),
        ("skyrl", "python -m skyrl.train.entrypoints.main_base trainer.algorithm.advantage_estimator=grpo",
         "trainer.placement.colocate_all=false generator.inference_engine.gpu_memory_utilization=0.8",
         "--vllm_mode server --vllm_server_host 127.0.0.1"),
        ("slime", "python3 train.py --colocate --rollout-batch-size 32 --n-samples-per-prompt 8", "--custom-generate-function-path a.b",
         "--custom_generate_function_path none"),
    ],
)  # fmt: skip
def test_external_script_unsupported_argument_is_overridden_on_command_line(tmp_path, dialect, start, refused, instead):
    """The command line wins over the file, in names that are refused too."""
    script = tmp_path / "run.sh"
    script.write_text(f"{start} {refused}\n")
    argv = ["--dialect", dialect, "--config", str(script), "--world_size", "8", "--reward_funcs", "math"]
    with pytest.raises(ConfigError):
        check(argv)
    check([*argv, *instead.split()])
    script.write_text(f"{start}\n")
    with pytest.raises(ConfigError):  # and the other way round
        check([*argv, *(refused if "--vllm_mode" not in instead else "generator.max_turns=4").split()])
