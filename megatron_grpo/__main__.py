from megatron_grpo.cli import main

raise SystemExit(main())
