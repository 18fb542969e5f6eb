#!/bin/bash
if [ "$(cat /app/region.txt)" = "eu west" ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
