"""What other systems have and this one does not: one sentence each. A capability that arrives takes its line out."""

OTHER_ADAPTERS = "of adapters LoRA alone is there, which vLLM samples from (tuner_type lora)"
LORA_BIAS = "a bias beside a frozen weight gets no gradient in Megatron's linear layers, and vLLM samples without it"
MODULES_TO_SAVE = "whole layers would train beside the adapter, which vLLM cannot sample from; tuner_type full trains them"
DORA = "its scale is the norm of base and adapter together, which no shard knows, and vLLM cannot sample from it"
LORA_START = "A begins uniform and B zero, as in PEFT; other beginnings change the base, which is then another model than the sampler's"
LORA_TARGETS = "adapters are on linear layers, which target_modules names"
ONE_LR = "A and B have one learning rate"
SERVER = "servers are started beside a run (megatron-grpo serve) and named with vllm_mode server and vllm_server_host"
ENGINES = "engines of a rollout server beside each other are its own setting (megatron-grpo serve --vllm_data_parallel_size)"
IMAGES = "of what models see and hear pictures alone are there, and this setting of theirs is not (docs/images.md)"
TURNS = "multi-turn environments are named with --environment and --tools (docs/turns.md)"
TEACHER = (
    "distillation: one teacher for all rows, which is a Hugging Face checkpoint as it stands: in the training ranks (teacher_model), or on "
    "servers of its own (teacher_model_server, megatron-grpo serve --frozen true)"
)
GKD = "a teacher is asked for its log-prob of each drawn token, and not for its whole distribution or for answers of its own"
QUANTIZED = "quantised weights, weights held in FP8, fp4 and fp16 are not there: bfloat16 or float32, with fp8_format for linear layers"
FREEZE_RATIO = (
    "it counts the parameters of one rank in their order, so what is frozen would depend on tensor_model_parallel_size: name what is "
    "frozen in freeze_parameters"
)
SPARSE_UPDATES = "what trains is chosen once, by freeze_parameters and trainable_parameters"
OTHER_LOSS = "that loss is not there"
OTHER_OPTIMIZER = "the optimizer is AdamW"
OTHER_TASK = "only GRPO on a causal language model is there"
AHEAD = (
    "weights are not pushed into running requests; async_rollout_depth 1 samples one whole rollout ahead of training, with vllm_mode "
    "server and rollout_importance_sampling_mode token_truncate"
)
APART = (
    "rollouts on GPUs of their own are vllm_mode server, beside megatron-grpo serve; async_rollout_depth 1 samples one ahead of training"
)
DROPS_TOKENS = "experts take every token here; a capacity that drops some is not there"
PLUGINS = "of plugin files reward functions alone are loaded; name one as path/to/file.py:function in reward_funcs"
SAMPLING = "sampling is by temperature, top_k, top_p and min_p alone, because training log-probs must be those of the sampler"
PENALTY = (
    "it makes a word's probability depend on which words were said before it, and training log-probs are of the logits alone; "
    "eval_generation_kwargs takes it for evaluation"
)
SPECULATES = (
    "with speculative decoding what is drawn depends on what else is in the engine's batch, so that neither a seed nor a resumed run would "
    "draw the same tokens again"
)
TOKENISED_ELSEWHERE = "prompts are tokenised here, with the model's own template: dataset takes files, directories and Hub names"
COLUMNS = "columns are never renamed by guessing; columns gives them other names"
SUBSET = "a subset is named behind its data set: dataset owner/name:subset"
EPOCH = "saving and evaluating is counted in optimizer steps: give save_steps and eval_steps"
SHARDED_ELSEWHERE = (
    "DeepSpeed and FSDP are not used: Megatron shards (tensor_model_parallel_size, pipeline_model_parallel_size, use_distributed_optimizer)"
)
RESUMED_ELSEWHERE = "checkpoints of another system are not read; export them to Hugging Face format and give them as model"
MTP = "multi-token prediction heads are not trained"
VERSIONS = "other revisions and converted configurations are not read; give a directory as model"
CRITIC = "there is no critic: advantages are compared inside groups or batches"
EVALUATION = "held-out prompts are asked in their order"
BUILT = "the model is built as its config.json says: write it there, and give this name as none"
AHEAD_INSTEAD = ("async_rollout_depth 1",)
OTHER_MODEL = "it is of a layer that no family of models here has"
EVAL_SAMPLING = "give eval_generation_kwargs, which hands name=value to vLLM's SamplingParams for held-out prompts"

# What names that are set aside are about.
KERNELS = "how fast something is computed, not what: kernels, fusions, overlap"
MEMORY = "where something lies while it waits, not what is computed"
LOADING = "how rows are read and batches are laid out; prompts come in the seeded order, and sequences are packed"
LOGS = "what is told of a run"
FILES = "what is written and how; a checkpoint here holds all that resuming needs"
