#!/bin/bash
if [ "$(readlink -f /app/current)" = /app/releases/2 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
