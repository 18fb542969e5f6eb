_hx_done=1
# Writes the session's state as commands that bring it back. `\builtin`, because the session may have
# functions and aliases of the same names; `|| :`, because under errexit a step that fails would end
# it. Options come first and last: some change how functions are read, some would show in the rest.
{ [[ $SHELLOPTS$BASHOPTS = "$_hx_opts" ]] || \builtin shopt -p
[[ $_hx_tmp && $PWD = "$_hx_tmp" ]] && PWD=$_hx_pwd
\builtin printf "cd -- %q\n" "$PWD"
\builtin umask -p
\builtin export -p
\builtin declare -f
\builtin alias -p
[[ $SHELLOPTS$BASHOPTS = "$_hx_opts" ]] || \builtin set +o
} >|"$_hx_s/$_hx_out" || :
