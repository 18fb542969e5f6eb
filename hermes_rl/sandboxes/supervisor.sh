# The shell side of the protocol; shell.py is the host side and explains it.
# Arguments: $1 control directory (made by the host; read-only here), $2 state directory (ours),
# $3.. arguments of `ulimit`, in pairs, and last the lease. Standard input and output: the control
# channel.
_hx_c=$1 _hx_s=$2 _hx_flag= _hx_done= _hx_wait= _hx_sigs='HUP INT QUIT TERM USR1 USR2 TSTP TTIN TTOU PIPE'
shift 2
while (($# > 1)); do ulimit "$1" "$2" || exit 125; shift 2; done
set --
exec 3<&0 4>&1 0</dev/null 1>/dev/null 2>&1
printf 1000 >/proc/self/oom_score_adj
unset OLDPWD
export -n SHLVL
umask 022
((BASH_VERSINFO[0] >= 5)) && _hx_wait=-f
set -m
shopt -s expand_aliases
trap '' $_hx_sigs
# Saves the session's state at a command's end; a name of our own in front of each builtin, because
# the command may have made functions and aliases of the same name; `|| :` switches errexit off.
_hx_save='{ _hx_rc=$?; if [[ ! $_hx_done ]]; then _hx_done=1; {
[[ $SHELLOPTS$BASHOPTS = "$_hx_opts" ]] || \builtin shopt -p
[[ $_hx_tmp && $PWD = "$_hx_tmp" ]] && PWD=$_hx_pwd
\builtin printf "cd -- %q\n" "$PWD"; \builtin umask -p; \builtin export -p
\builtin declare -f; \builtin alias -p
[[ $SHELLOPTS$BASHOPTS = "$_hx_opts" ]] || \builtin set +o
} >|"$_hx_s/$_hx_out"; fi; } 2>/dev/null || :'
printf 'R\n' >&4
while IFS=' ' read -r _hx_k _hx_n _hx_in _hx_src _hx_out <&3; do
  case $_hx_k in
  r) # a command of the session: n is the output pipe, src the state to start from, out where to save
    : >|"$_hx_s/$_hx_out"
    (
      set +m; trap - $_hx_sigs; _hx_opts=$SHELLOPTS$BASHOPTS _hx_tmp=
      . "$_hx_src"
      trap "$_hx_save" EXIT
      . "$_hx_c/cmd"
      eval "$_hx_save"
      exit $_hx_rc
    ) <"$_hx_in" >"$_hx_c/$_hx_n" 2>&1 3<&- 4>&- &
    wait $_hx_wait $!
    _hx_rc=$?
    [[ -s $_hx_s/$_hx_out ]] && _hx_flag=1 || _hx_flag=0
    printf 'E %s %s\n' "$_hx_rc" "$_hx_flag" >&4 ;;
  i) # a command of the host's own: outside the session
    ( set +m; trap - $_hx_sigs; PATH=/usr/local/bin:/usr/bin:/bin; . "$_hx_c/cmd"
    ) <"$_hx_in" >"$_hx_c/$_hx_n" 2>&1 3<&- 4>&- &
    wait $_hx_wait $!
    printf 'E %s 0\n' "$?" >&4 ;;
  b) # a background process: its end is told by a subshell that holds the control channel
    (
      set -m
      ( set +m; trap - $_hx_sigs; . "$_hx_src"; . "$_hx_c/p$_hx_n.cmd"
      ) <"$_hx_c/p$_hx_n.in" >"$_hx_c/p$_hx_n.out" 2>&1 3<&- 4>&- &
      printf 'P %s %s\n' "$_hx_n" "$!" >&4
      wait $_hx_wait $!
      printf 'X %s %s\n' "$_hx_n" "$?" >&4
    ) 3<&- & ;;
  esac
done
