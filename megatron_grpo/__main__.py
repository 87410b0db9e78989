"""Run the command line: `python -m megatron_grpo`."""

from megatron_grpo.cli import main

raise SystemExit(main())
