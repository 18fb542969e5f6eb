#!/bin/bash
if [ "$(grep -cx beat /app/beats)" -ge 3 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
