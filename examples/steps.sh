# What the examples' run.sh have in common; they source it. It expects `here`, the example's folder, and `output`, the run's.

export OMP_NUM_THREADS=1  # a rank, whatever the shell says: threads of a tiny model wait for each other where the cores are busy

failed() { echo "VERDICT: FAILED: $*, see above"; exit 1; }

install() {  # install EXTRA...: the environment comes first on PATH
    local bin
    bin="$(bash tools/install.sh "$@")" || failed "the install did not finish"
    export PATH="$bin:$PATH"
}

count_ranks() {  # RANKS; else two, unless there is one GPU alone: each rank needs its own GPU
    local gpus
    [ -z "${RANKS:-}" ] || { echo "$RANKS"; return; }
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"  # none counts 0, which grep calls a failure
    if [ "$gpus" = 1 ]; then echo 1; else echo 2; fi
}

compute_key() {  # compute_key "FILE..." SETTING...: everything that decides how the run goes
    { cat $1; find megatron_grpo -name '*.py' | LC_ALL=C sort | xargs cat; echo "${RANKS:-}" "${@:2}"; } |
        python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

is_finished() {  # is_finished KEY: whether `output` is a finished run of just this, which AGAIN=1 does not count
    [ -z "${AGAIN:-}" ] && [ "$(cat "$output/finished_with" 2>/dev/null)" = "$1" ]
}

train() {  # train "FILE..." LABEL SETTING...: unless `output` is a finished run of just this
    local key label="$2" number code
    key="$(compute_key "$1" "${@:3}")"
    if is_finished "$key"; then
        echo "$label training: $output is a finished run of just this; kept (AGAIN=1 trains again)"
        return
    fi
    number="$(count_ranks)"
    echo "$label training: torchrun --nproc_per_node $number -m megatron_grpo train --config $here/config.yaml ${*:3}"
    torchrun --nproc_per_node "$number" -m megatron_grpo train --config "$here/config.yaml" --output_dir "$output" "${@:3}" ||
        { code=$?; failed "the training run ended with exit code $code"; }
    echo "$key" >"$output/finished_with"
}

evaluate() {  # evaluate LABEL PROMPTS FLAG VALUE SETTING...: the held-out set by the weights that FLAG VALUE names, into `output`-eval
    echo "$1: megatron-grpo eval $3 $4"
    python -m megatron_grpo eval --config "$here/config.yaml" --eval_datasets "held_out=$here/data/test.jsonl" --eval_num_prompts "$2" \
        --output_dir "$output-eval" "$3" "$4" "${@:5}" || failed "the evaluation did not finish"
}

before_and_after() {  # before_and_after "FILE..." LABEL PROMPTS SETTING...: evaluates, trains, evaluates; unless it is all there
    local key checkpoints
    key="$(compute_key "$1" "${@:4}")"
    if is_finished "$key" && [ "$(wc -l <"$output-eval/evaluations.jsonl" 2>/dev/null)" = 2 ]; then
        echo "$2 3/5, 4/5: $output and $output-eval are of just this; kept (AGAIN=1 trains again)"
        return
    fi
    rm -rf "$output-eval"
    evaluate "$2 3/5 before" "$3" --model "$here/model"
    train "$1" "$2 4/5" "${@:4}"
    checkpoints=("$output"/checkpoints/iter_*)
    evaluate "$2 4/5 after" "$3" --resume "${checkpoints[-1]}"
}
