"""Train the quickstart's model with the Python API, with the settings of config.yaml.

bash examples/quickstart/run.sh                once: makes the environment, the data and the model
python examples/quickstart/quickstart.py       in that environment, from the root of the repository
"""

from megatron_grpo import GRPOConfig, GRPOTrainer


def correct(completions, answer, **columns):
    """Return 1.0 for each completion that equals the column `answer`, else 0.0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


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
before, after = (result.evaluations[i]["correct"] for i in (0, -1))
print(f"held-out accuracy {before:.3f} -> {after:.3f}; model in {result.model}")
