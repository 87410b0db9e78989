"""The quickstart as a Python program: the run of config.yaml, with its reward as a function of this file.

bash examples/quickstart/run.sh                once, for the environment, the data and the model
python examples/quickstart/quickstart.py       from the root of the repository, in that environment
"""

from megatron_grpo import GRPOConfig, GRPOTrainer


def correct(completions, answer, **columns):
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    "examples/quickstart/model",
    correct,
    GRPOConfig(
        torch_dtype="float32",
        num_generations=8,
        global_batch_size=256,
        max_tokens_per_micro_batch=4096,
        max_completion_length=6,
        learning_rate=5e-4,
        lr_warmup_iters=5,
        lr_decay_style="cosine",
        max_steps=100,
        eval_steps=20,
        output_dir="output/quickstart_python",
        overwrite_output_dir=True,
    ),
    train_dataset="examples/quickstart/data/train.jsonl",
    eval_dataset="examples/quickstart/data/test.jsonl",
    nproc_per_node=1,
)
result = trainer.train()
print(f"held-out accuracy {result.evaluations[0]['correct']:.3f} -> {result.evaluations[-1]['correct']:.3f}; model in {result.model}")
