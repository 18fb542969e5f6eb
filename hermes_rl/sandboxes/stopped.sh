# A job that was stopped (SIGSTOP and its like: 147 to 150) is waited for until it has ended. The pipe
# to nap at needs no program, and the number of the job is kept: making the pipe changes `$!`.
if ((_hx_rc > 146 && _hx_rc < 151)); then
_hx_job=$!
exec {_hx_nap}<> <(:)
while ((_hx_rc > 146 && _hx_rc < 151)) && kill -0 $_hx_job; do
read -r -t 0.05 -u $_hx_nap
wait $_hx_job
_hx_rc=$?
done
exec {_hx_nap}<&-
fi
