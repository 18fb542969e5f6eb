#!/bin/bash
if [ "$(cat /app/tier.txt)" = gold ] && [ "$TIER" = gold ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
