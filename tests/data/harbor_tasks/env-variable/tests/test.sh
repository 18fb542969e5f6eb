#!/bin/bash
if [ "$(cat /app/port.txt)" = 8123 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
