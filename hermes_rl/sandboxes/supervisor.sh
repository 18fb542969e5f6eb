# The shell side of the protocol; shell.py is the host side, explains it, and puts the texts of
# save.sh and stopped.sh in the places of @SAVE@ and @STOPPED@. No apostrophes in save.sh: one of its
# places is quoted.
# Never `wait -f`: bash 5.2 looks at a job that it has freed, and in one shell of 256 it then waits in
# a busy loop for ever (wait_for_single_pid reads a byte of glibc's key for freed memory as a state).
# Plain `wait` also returns when the job is stopped; those codes are looked at again.
# Arguments: $1 control directory (made by the host; read-only here), $2 state directory (ours),
# $3.. arguments of `ulimit`, in pairs, and last the lease. Standard input and output: the control
# channel.
_hx_c=$1 _hx_s=$2 _hx_done= _hx_tmp= _hx_number=0
shift 2
while (($# > 1)); do ulimit "$1" "$2" || exit 125; shift 2; done
set --
exec 3<&0 4>&1 0</dev/null 1>/dev/null 2>&1
printf 1000 >/proc/self/oom_score_adj
export -n SHLVL
shopt -s expand_aliases
trap '' HUP INT QUIT TERM USR1 USR2
_hx_save='@SAVE@'
# The state that a session starts from. A command that starts from it has nothing to read: this
# shell is in that state, and commands are forked from here. What a later state lacks of it must go.
. "$_hx_c/env"
_hx_opts=$SHELLOPTS$BASHOPTS
{
@SAVE@
} >|"$_hx_s/a"
IFS= read -r -d '' _hx_first <"$_hx_s/a"
_hx_first=${_hx_first%#*} _hx_done=
set -m
printf 'R\n' >&4
while IFS=' ' read -r _hx_k _hx_n _hx_in _hx_src _hx_out <&3; do
  case $_hx_k in
  r) # a command of the session: n names its output pipe, src its state, out the next
    _hx_number=$((_hx_number + 1))
    (
      set +m
      trap - HUP INT QUIT TERM USR1 USR2
      # For a command that calls `exit`. Under errexit a step of saving that fails must not end it.
      trap '{ [[ $_hx_done ]] || eval "$_hx_save" >|"$_hx_s/$_hx_out" || :; } 2>/dev/null' EXIT
      [[ $_hx_src = - ]] || { unset $_hx_names; . "$_hx_src"; }
      . "$_hx_c/cmd"
      {
        _hx_rc=$?
@SAVE@
      } 2>/dev/null >|"$_hx_s/$_hx_out" || :
      exit $_hx_rc
    ) <"$_hx_in" >"$_hx_c/$_hx_n" 2>&1 3<&- 4>&- &
    wait $!
    _hx_rc=$?
@STOPPED@
    _hx_now=
    # A command may have put a pipe there, at which this shell would wait.
    [[ -f $_hx_s/$_hx_out ]] && IFS= read -r -d '' _hx_now <"$_hx_s/$_hx_out"
    case $_hx_now in
    "$_hx_first#$_hx_number"$'\n') _hx_now=- ;; # as at the start
    *"#$_hx_number"$'\n') _hx_now=s ;;
    *) _hx_now= ;; # not saved: killed, or its state file is of an earlier command
    esac
    printf 'E %s %s\n' $_hx_rc "$_hx_now" >&4 ;;
  i) # a command of the host's own: outside the session
    (
      set +m
      trap - HUP INT QUIT TERM USR1 USR2
      PATH=/usr/local/bin:/usr/bin:/bin
      . "$_hx_c/cmd"
    ) <"$_hx_in" >"$_hx_c/$_hx_n" 2>&1 3<&- 4>&- &
    wait $!
    _hx_rc=$?
@STOPPED@
    printf 'E %s 0\n' $_hx_rc >&4 ;;
  b) # a background process: its end is told by a subshell that holds the control channel
    (
      set -m
      # Both pipes are open before its start is reported: from there on the host may close their ends.
      exec <"$_hx_c/p$_hx_n.in" >"$_hx_c/p$_hx_n.out" 2>&1
      (
        set +m
        trap - HUP INT QUIT TERM USR1 USR2
        [[ $_hx_src = - ]] || { unset $_hx_names; . "$_hx_src"; }
        . "$_hx_c/p$_hx_n.cmd"
      ) <&0 3<&- 4>&- &
      printf 'P %s %s\n' "$_hx_n" $! >&4
      exec </dev/null >/dev/null 2>&1
      wait $!
      _hx_rc=$?
@STOPPED@
      printf 'X %s %s\n' "$_hx_n" $_hx_rc >&4
    ) 3<&- & ;;
  esac
done
