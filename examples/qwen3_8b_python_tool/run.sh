#!/usr/bin/env bash
# Needs one node with 8 GPUs. Arguments are settings of the trainer: bash examples/qwen3_8b_python_tool/run.sh --max_steps 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PATH="$(bash tools/install.sh data math plot):$PATH"
config=examples/qwen3_8b_python_tool/config.yaml
[ -s examples/qwen3_8b_python_tool/data/test.jsonl ] || python examples/qwen3_8b_python_tool/make_data.py

megatron-grpo plan --config "$config" --world_size 8 --gpu_memory_gb 80 "$@"
exec torchrun --standalone --nproc_per_node 8 --shutdown-timeout 300 -m megatron_grpo train --config "$config" "$@"
