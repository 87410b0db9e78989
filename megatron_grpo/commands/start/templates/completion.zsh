_megatron_grpo() {
    local flags= offered=
    local -a before=("${(@)words[2,CURRENT-1]}") described
    [[ $PREFIX != *=* ]] || { before+=("${PREFIX%%=*}" =); compset -P 1 '*='; }
    _megatron_grpo_after "$before[@]"
    described=("${(@f)flags}")
    if ((CURRENT == 2)); then
        _describe command described
    elif [[ -z $offered || $PREFIX == -* && $PREFIX != -[0-9]* ]]; then
        _describe -o option described -M 'm:-=_'
    elif [[ $offered == number ]]; then
        _message number
    elif [[ $offered == *= ]]; then
        compadd -S '' ${=offered}
    elif [[ $offered == file ]] || ! compadd ${=offered}; then
        _files
    fi
}
if [[ $funcstack[1] == _megatron_grpo ]]; then _megatron_grpo "$@"; else compdef _megatron_grpo megatron-grpo; fi
