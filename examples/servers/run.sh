#!/usr/bin/env bash
# Train the quickstart's task with two rollout servers and two trainer ranks on one machine. During the run one server is killed and another
# one is started; the run must still reach the quickstart's accuracy. Arguments are settings of the training run:
#
#   bash examples/servers/run.sh
#   AGAIN=1 bash examples/servers/run.sh                  train again even if nothing has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/servers output=output/servers
source examples/steps.sh
addresses=output/servers_addresses logs=output/servers_logs
declare -A servers  # name -> process ID

start() {  # start NAME: start a server in the background; it writes its address to $addresses/NAME when it is ready
    megatron-grpo serve --config $here/config.yaml --port 0 --address_file "$addresses/$1" >"$logs/$1.log" 2>&1 &
    servers[$1]=$!
}

wait_for_servers() {  # wait_for_servers NAME...: wait until each is ready. A loading server logs every 10 s; SILENCE seconds without a line are a failure
    local name
    for name in "$@"; do
        until [ -s "$addresses/$name" ]; do
            kill -0 "${servers[$name]}" 2>/dev/null || failed "server $name exited before it was ready, see $logs/$name.log"
            [ $(($(date +%s) - $(stat -c %Y "$logs/$name.log"))) -lt "${SILENCE:-240}" ] ||
                failed "server $name has logged nothing for ${SILENCE:-240} s, see $logs/$name.log"
            sleep 0.2
        done
    done
}

stop_all() {  # stop all servers with SIGTERM; the result is nonzero unless each exits with code 0
    local name code=0
    for name in "${!servers[@]}"; do
        kill -TERM "${servers[$name]}" 2>/dev/null || true  # it may have exited
        wait "${servers[$name]}" || { code=$?; echo "[servers] server $name exited with code $code, see $logs/$name.log"; }
    done
    servers=()
    return $code
}

wait_for_step() {  # wait_for_step N: wait until the run has taken N optimizer steps; fails if the run exits before
    until [ "$(cat $output/metrics.jsonl 2>/dev/null | wc -l)" -ge "$1" ]; do
        kill -0 "$trainer" 2>/dev/null || return 1
        sleep 0.2
    done
}

change_servers() {  # kill server one after 30 steps and start server three after 50
    wait_for_step 30 || return 0
    kill -KILL "${servers[one]}"
    rm -f "$addresses/one"  # a killed server does not remove its address
    echo "[servers] step 30: server one is killed"
    wait_for_step 50 || return 0
    start three
    echo "[servers] step 50: server three is started"
}

echo "[servers] 1/5 environment"
install plot

echo "[servers] 2/5 data and model"
python examples/quickstart/make_data.py
python tools/make_tiny_model.py

key="$(compute_key "$here/config.yaml $here/run.sh examples/quickstart/reward.py examples/quickstart/model/made_by.json" "$@")"
if is_finished "$key"; then
    echo "[servers] 3/5, 4/5 $output is a finished run with these settings and this code; kept (AGAIN=1 trains again)"
else
    rm -rf $addresses $logs $output
    mkdir -p $addresses $logs
    export MEGATRON_GRPO_TOKEN
    MEGATRON_GRPO_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(16))')"
    trap stop_all EXIT
    echo "[servers] 3/5 servers one and two; their logs are in $logs"
    start one
    start two
    wait_for_servers one two

    number="$(count_ranks)"
    echo "[servers] 4/5 training: torchrun --nproc_per_node $number -m megatron_grpo train --config $here/config.yaml $*"
    torchrun --nproc_per_node "$number" -m megatron_grpo train --config $here/config.yaml --output_dir $output "$@" &
    trainer=$!
    change_servers
    wait $trainer || failed "the training run exited with code $?"
    wait "${servers[one]}" 2>/dev/null || true  # the killed one
    unset "servers[one]"
    trap - EXIT
    stop_all || failed "a server did not exit with code 0"
    echo "$key" >$output/finished_with
fi

echo "[servers] 5/5 verdict"
python $here/verdict.py $output $logs
