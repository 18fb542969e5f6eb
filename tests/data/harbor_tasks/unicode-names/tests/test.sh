#!/bin/bash
if grep -qx 12 /app/size; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
