#!/usr/bin/env bash
# Write the lock files anew from pyproject.toml: newest versions that fit, with hashes, for every Python and Linux that we
# support. Versions already in a lock are kept; `scripts/lock.sh --upgrade` moves them all.
#
#   locks/dev.txt        base + dev: what `make test`, `make lint` and `make bench` install
#   locks/demo.txt       base + local: what `make demo` installs, a subset of dev.txt at the same versions
#   locks/prove.txt      what `make prove` needs on top of dev.txt, at the same versions where both have it; torch is left out, as below
#   locks/atropos.txt    what `make bench-atropos` measures us beside
#   locks/consumers*.txt the readers of `make test-consumers`, an environment each, torch left out: its CPU and CUDA builds share a version but
#                        not a hash, and the plain index has only the CUDA build on x86_64. One lock that fits both
#                        kinds of machine is not possible, so the Makefile names torch's version and pip takes the
#                        build that the machine's own pip settings offer.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools/venv"
"$tools/venv/bin/python" -m pip install -qq --disable-pip-version-check uv

compile() { # OUT ARGUMENT...
    local out=$1
    shift
    "$tools/venv/bin/uv" pip compile --quiet --universal --python-version "${floor:-3.11}" --generate-hashes \
        --no-emit-index-url --no-header --no-annotate --output-file "$out" "$@" >/dev/null
    echo "$out: $(grep -c '==' "$out") packages"
}

mkdir -p locks
compile locks/dev.txt pyproject.toml --extra dev --group build "$@"
compile locks/demo.txt pyproject.toml --extra local --group build --constraint locks/dev.txt "$@"
compile locks/atropos.txt locks/atropos.in "$@"
compile locks/prove.txt locks/prove.in --constraint locks/dev.txt "$@"
echo "torch ; sys_platform == 'none'" >"$tools/overrides.txt"
# Trainers that run our rollouts have this package beside them.
with_us=(pyproject.toml --extra rl --group build)
compile locks/consumers.txt "${with_us[@]}" --group consumers --override "$tools/overrides.txt" "$@"
for name in verl axolotl protocols verifiers proxies evals mcp; do
    ours=()
    if [ "$name" = verl ]; then ours=("${with_us[@]}"); fi
    compile "locks/consumers-$name.txt" "locks/consumers-$name.in" "${ours[@]}" --override "$tools/overrides.txt" "$@"
    alone=locks/consumers-$name.alone.in
    if [ -f "$alone" ]; then
        # Programs of which we run a small part: what that needs stands in the .in file, the rest is left out. harbor names a
        # newer Python than that part needs (make test-consumers lets pip pass over it).
        floor=3.12 compile "$tools/alone.txt" --no-deps "$alone" "$@"
        cat "$tools/alone.txt" >>"locks/consumers-$name.txt"
    fi
done
