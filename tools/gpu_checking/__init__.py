"""The GPU check, `tools/gpu_check.sh`: what it does (`steps`), and how a step is run, remembered and told (`run`)."""
