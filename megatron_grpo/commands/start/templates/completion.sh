#compdef megatron-grpo
# Completion of megatron-grpo for @SHELL@, made by `megatron-grpo completion @SHELL@`.
_megatron_grpo_after() {  # the words before the cursor: the command first, and `name=value` as three words
    local word last= key= flag= count=0 settings=@SETTINGS@
    case $1 in
@COMMANDS@
    esac
    for word; do
        case $word in
            (--*=*) flag= key= ;;
            (--*) flag=$word key= count=0 ;;
            (=) key=$last ;;
            (*) key= count=$((count + 1)) ;;
        esac
        last=$word
    done
    [[ -z $key ]] || { flag=$key; count=0; }
    flag=${flag#--} flag=${flag//-/_}
    case $flag in
        (@SEVERAL@) ;;
        (*) ((count == 0)) || flag= ;;  # it has its value
    esac
    case $flag in
        ("") ;;
@VALUES@
        (@NUMBERS@) offered=number ;;
        (*) offered=file ;;
    esac
}
