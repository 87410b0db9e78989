#!/usr/bin/env bash
# Needs one node with 8 GPUs, and docker or podman. Arguments are settings of the trainer: bash examples/agent_swe/run.sh --max_steps 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PATH="$(bash tools/install.sh plot):$PATH"
config=examples/agent_swe/config.yaml
export AGENT_IMAGE="${AGENT_IMAGE:-docker.io/library/python:3.12-slim}"
python -m pip install --quiet mini-swe-agent
[ -s examples/agent_swe/data/test.jsonl ] || python examples/agent_swe/make_data.py

megatron-grpo plan --config "$config" --world_size 8 --gpu_memory_gb 80 "$@"
exec torchrun --standalone --nproc_per_node 8 --shutdown-timeout 300 -m megatron_grpo train --config "$config" "$@"
