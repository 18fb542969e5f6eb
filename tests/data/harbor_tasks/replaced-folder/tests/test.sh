#!/bin/bash
if [ "$(cat /app/plugins)" = new ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
