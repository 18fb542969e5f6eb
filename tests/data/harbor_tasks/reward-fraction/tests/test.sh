#!/bin/bash
n=0
for x in a b c d; do [ "$(cat /app/$x 2>/dev/null)" = $x ] && n=$((n + 25)); done
printf '%d.%02d\n' $((n / 100)) $((n % 100)) >/logs/verifier/reward.txt
