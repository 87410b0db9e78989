_megatron_grpo() {
    local current=${COMP_WORDS[COMP_CWORD]} flags= offered= before=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
    [[ $current != "=" ]] || { before+=("="); current=; }  # bash splits at `=`
    _megatron_grpo_after "${before[@]}"
    if [[ $current == -* && $current != -[0-9]* ]]; then
        current=${current#-} current=${current#-}
        offered=$flags current=--${current//-/_}
    fi
    COMPREPLY=()
    case ${offered:=$flags} in
        number) compopt +o default ;;
        file) ;;
        *=) compopt -o nospace ;&
        *) COMPREPLY=($(compgen -W "$offered" -- "$current")) ;;
    esac
}
complete -o default -F _megatron_grpo megatron-grpo
