#!/bin/bash
if cmp -s /app/sorted /tests/expected/sorted; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
