# Functions of the examples' run.sh, which source this file. `here` is the directory of the example and `output` the output_dir of its run.

export OMP_NUM_THREADS=1  # per rank: more threads slow down a tiny model on busy cores

failed() { echo "VERDICT: FAILED: $*, see above"; exit 1; }

install() {  # install EXTRA...: install the package and put its environment first on PATH
    local bin
    bin="$(bash tools/install.sh "$@")" || failed "the installation failed"
    export PATH="$bin:$PATH"
}

count_ranks() {  # print RANKS if set; else 1 if there is one GPU, because each rank needs its own; else 2
    local gpus
    [ -z "${RANKS:-}" ] || { echo "$RANKS"; return; }
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"  # grep fails if it counts 0
    if [ "$gpus" = 1 ]; then echo 1; else echo 2; fi
}

compute_key() {  # compute_key "FILE..." SETTING...: print a hash of the files, the settings and the package
    { cat $1; find megatron_grpo -name '*.py' | LC_ALL=C sort | xargs cat; echo "${RANKS:-}" "${@:2}"; } |
        python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

is_finished() {  # is_finished KEY: whether `output` is a finished run with this key; never with AGAIN=1
    [ -z "${AGAIN:-}" ] && [ "$(cat "$output/finished_with" 2>/dev/null)" = "$1" ]
}

train() {  # train "FILE..." LABEL SETTING...: train, unless `output` is a finished run of the same files and settings
    local key label="$2" number code
    key="$(compute_key "$1" "${@:3}")"
    if is_finished "$key"; then
        echo "$label training: $output is a finished run with these settings and this code; kept (AGAIN=1 trains again)"
        return
    fi
    number="$(count_ranks)"
    echo "$label training: torchrun --nproc_per_node $number -m megatron_grpo train --config $here/config.yaml ${*:3}"
    torchrun --nproc_per_node "$number" -m megatron_grpo train --config "$here/config.yaml" --output_dir "$output" "${@:3}" ||
        { code=$?; failed "the training run exited with code $code"; }
    echo "$key" >"$output/finished_with"
}

evaluate() {  # evaluate LABEL PROMPTS FLAG VALUE SETTING...: evaluate the weights of FLAG VALUE on the held-out set, into $output-eval
    echo "$1: megatron-grpo eval $3 $4"
    python -m megatron_grpo eval --config "$here/config.yaml" --eval_datasets "held_out=$here/data/test.jsonl" --eval_num_prompts "$2" \
        --output_dir "$output-eval" "$3" "$4" "${@:5}" || failed "the evaluation failed"
}

before_and_after() {  # before_and_after "FILE..." LABEL PROMPTS SETTING...: evaluate, train and evaluate again, unless all of it exists
    local key checkpoints
    key="$(compute_key "$1" "${@:4}")"
    if is_finished "$key" && [ "$(wc -l <"$output-eval/evaluations.jsonl" 2>/dev/null)" = 2 ]; then
        echo "$2 3/5, 4/5: $output and $output-eval are finished with these settings and this code; kept (AGAIN=1 trains again)"
        return
    fi
    rm -rf "$output-eval"
    evaluate "$2 3/5 before" "$3" --model "$here/model"
    train "$1" "$2 4/5" "${@:4}"
    checkpoints=("$output"/checkpoints/iter_*)
    evaluate "$2 4/5 after" "$3" --resume "${checkpoints[-1]}"
}
