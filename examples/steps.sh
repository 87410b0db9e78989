# What the examples' run.sh have in common; they source it. It expects `here`, the example's folder, and `output`, the run's.

export OMP_NUM_THREADS=1  # a rank, whatever the shell says: threads of a tiny model wait for each other where the cores are busy

failed() { echo "VERDICT: FAILED: $*, see above"; exit 1; }

install() {  # install EXTRA...: the environment comes first on PATH
    local bin
    bin="$(bash tools/install.sh "$@")" || failed "the install did not finish"
    export PATH="$bin:$PATH"
}

ranks() {  # two, unless there is one GPU alone: each rank needs a GPU of its own
    local gpus
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"  # none counts 0, which grep calls a failure
    if [ "$gpus" = 1 ]; then echo 1; else echo 2; fi
}

key_of() {  # key_of "FILE..." SETTING...: everything that decides how the run goes
    { cat $1; find megatron_grpo -name '*.py' | LC_ALL=C sort | xargs cat; echo "${@:2}"; } |
        python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

is_finished() {  # is_finished KEY: whether `output` is a finished run of just this, which AGAIN=1 does not count
    [ -z "${AGAIN:-}" ] && [ "$(cat "$output/finished_with" 2>/dev/null)" = "$1" ]
}

train() {  # train "FILE..." LABEL SETTING...: unless `output` is a finished run of just this
    local key label="$2" number code
    key="$(key_of "$1" "${@:3}")"
    if is_finished "$key"; then
        echo "$label training: $output is a finished run of just this; kept (AGAIN=1 trains again)"
        return
    fi
    number="$(ranks)"
    echo "$label training: torchrun --nproc_per_node $number -m megatron_grpo train --config $here/config.yaml ${*:3}"
    torchrun --nproc_per_node "$number" -m megatron_grpo train --config "$here/config.yaml" --output_dir "$output" "${@:3}" ||
        { code=$?; failed "the training run ended with exit code $code"; }
    echo "$key" >"$output/finished_with"
}
