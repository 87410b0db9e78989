#!/usr/bin/env bash
# Needs one node with 8 GPUs. Arguments are settings of the trainer: bash examples/qwen2_5_vl_7b/run.sh --max_steps 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PATH="$(bash tools/install.sh data images math plot):$PATH"
config=examples/qwen2_5_vl_7b/config.yaml
[ -s examples/qwen2_5_vl_7b/data/test.jsonl ] || python examples/qwen2_5_vl_7b/make_data.py

megatron-grpo plan --config "$config" --world_size 8 --gpu_memory_gb 80 "$@"
exec torchrun --standalone --nproc_per_node 8 --shutdown-timeout 300 -m megatron_grpo train --config "$config" "$@"
