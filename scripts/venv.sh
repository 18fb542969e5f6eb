#!/usr/bin/env bash
# Make a virtual environment ready from a lock file; do nothing, quickly, when it is ready already.
#
#   scripts/venv.sh FOLDER LOCK [--editable | --over BASE] [REQUIREMENT...]
#
# Everything in LOCK is installed with its hashes checked; --editable adds this checkout, built by the locked hatchling, without
# a download; --over makes the packages of the environment BASE available too; a REQUIREMENT is installed last and unhashed (torch, see scripts/lock.sh). PYTHON names the interpreter: a FOLDER
# of another one is built again. Without it a FOLDER keeps its interpreter, and a new one gets python3. pip's own settings (index,
# proxy, certificates) are left as they are. A stamp in FOLDER holds what was installed.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1 lock=$2
shift 2
python=${PYTHON:-python3}
editable= base=
if [ "${1:-}" = --editable ]; then
    editable=yes
    shift
elif [ "${1:-}" = --over ]; then
    base=$2
    shift 2
    python=${PYTHON:-$base/bin/python}
fi

die() {
    echo "error: $*" >&2
    exit 2
}

# Two makes at once (`make demo` and `make test`) take turns.
mkdir -p .make
exec 9>".make/${folder##*/}.lock"
if command -v flock >/dev/null; then flock 9; fi

fingerprint() { # of everything that decides what the folder should hold
    { pwd; echo "$editable$base $*"; cat "$1" pyproject.toml; cat hatch_build.py hermes_rl/sandboxes/zygote.c 2>/dev/null || true; } | sha256sum | cut -d' ' -f1
}
identify() { # the interpreter; of a virtual environment, the one that it was made with
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null || true
}
other=
if [ -n "${PYTHON:-}" ] && [ "$(identify "$python")" != "$(identify "$folder/bin/python")" ]; then other=yes; fi
stamp=$folder/.stamp-$(basename "$lock" .txt)
want=$(fingerprint "$lock" "$@")
# dev.txt holds all of demo.txt.
for ready in "$stamp" "${stamp/-demo/-dev}"; do
    of=locks/${ready##*.stamp-}.txt
    if [ -z "$other" ] && [ -f "$ready" ] && [ "$(cat "$ready")" = "$(fingerprint "$of" "$@")" ] && [ -x "$folder/bin/python" ]; then
        exit 0
    fi
done

command -v "$python" >/dev/null || die "no $python here. Install Python 3.11 or newer, or use make PYTHON=/path/to/python3.11"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2], int((3, 11) <= sys.version_info[:2] < (3, 15)))') ||
    die "$python does not run. Use make PYTHON=/path/to/python3.11"
[ "${version#* }" = 1 ] || die "$python is Python ${version% *}, this needs 3.11 to 3.14. Use make PYTHON=/path/to/python3.11"
if [ -n "$other" ] || ! "$folder/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module. On Debian or Ubuntu: apt-get install python${version% *}-venv"
    "$python" -m venv --clear "$folder"
fi

if [ -n "$base" ]; then # with the .pth files there: this checkout is installed by one
    "$folder/bin/python" -c 'import site, sys, sysconfig
where = sysconfig.get_path("purelib", vars={"base": sys.argv[1], "platbase": sys.argv[1]})
open(site.getsitepackages()[0] + "/base.pth", "w").write(f"import site; site.addsitedir({where!r})\n")' "$PWD/$base"
fi

pip() {
    "$folder/bin/python" -m pip --disable-pip-version-check --no-input install -qq "$@" ||
        die "pip could not install into $folder (its message is above). Fix that, then run the same command"
}
started=$SECONDS
echo "packages: $(grep -c '==' "$lock") from $lock into $folder (a minute or two the first time)"
rm -f "$folder"/.stamp-*
# The lock is complete, so pip need not resolve anything (--no-deps; a test runs `pip check`). Compiling all of it takes a
# third of the time; Python compiles what it imports.
pip --require-hashes --no-deps --no-compile -r "$lock"
if [ -n "$editable" ]; then pip --no-deps --no-build-isolation --editable .; fi
if [ $# -gt 0 ]; then pip "$@"; fi
echo "$want" >"$stamp"
echo "packages: ready in $((SECONDS - started)) s"
