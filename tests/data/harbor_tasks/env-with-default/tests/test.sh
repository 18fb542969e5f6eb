#!/bin/bash
if [ "$(cat /app/level.txt)" = debug ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
