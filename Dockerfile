# GPU image: Python 3.12, CUDA 13, vLLM, the newest Megatron-Core, Transformer Engine, and NVIDIA Apex from source.
#
#   docker build -t megatron-grpo .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -it megatron-grpo plan --help
#   docker build --target apex .            only the stage that builds Apex
#
# The CPU stack needs no image: run `bash tools/install.sh`. tests/unit/tools/test_dockerfile.py compares this file with setup.py.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS base

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev python3-venv build-essential git ninja-build \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH

# The slow layers come first and do not depend on the code. vLLM determines the version of torch that everything else is built against.
RUN pip install "vllm==0.33.0" "setuptools==80.9.0" "wheel==0.45.1" "pybind11==3.0.1"

# Apex is optional (fused Adam if Transformer Engine is missing) and available as source only: the PyPI project of that name is another
# program. A separate stage builds it in parallel and keeps its sources out of the image.
FROM base AS apex
ARG MAX_JOBS=8
ARG APEX_REF=25.09
RUN git clone --depth 1 --branch "$APEX_REF" https://github.com/NVIDIA/apex /tmp/apex
WORKDIR /tmp/apex
RUN MAX_JOBS="$MAX_JOBS" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM base AS run
ARG MAX_JOBS=8
RUN MAX_JOBS="$MAX_JOBS" NVTE_FRAMEWORK=pytorch pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.20.2"
RUN --mount=type=bind,from=apex,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl

# Requirements of setup.py are installed before the code is copied, so that a change of the code needs no download.
WORKDIR /opt/megatron_grpo
RUN pip install "megatron-core==0.19.2" "datasets==4.*" "math-verify==0.8.*" "matplotlib==3.*" "tensorboard==2.*"
COPY . .
RUN pip install --no-build-isolation -e ".[vllm,te,data,math,plot,tensorboard,referee]"

ENTRYPOINT ["megatron-grpo"]
CMD ["--help"]
