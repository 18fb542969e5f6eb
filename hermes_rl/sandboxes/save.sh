_hx_done=1
# Prints the session's state as commands that bring it back. `\builtin`, because the session may have
# functions and aliases of the same names. Options come first and last: some change how functions are
# read, some would show in the rest. The number says that this is whole, and of this command.
[[ $SHELLOPTS$BASHOPTS = "$_hx_opts" ]] || \builtin shopt -p
[[ $_hx_tmp && $PWD = "$_hx_tmp" ]] && PWD=$_hx_pwd
\builtin printf "cd -- %q\n" "$PWD"
\builtin umask -p
\builtin export -p
\builtin declare -f
\builtin alias -p
[[ $SHELLOPTS$BASHOPTS = "$_hx_opts" ]] || \builtin set +o
\builtin printf "%s\n" "#$_hx_number"
\builtin set +x
