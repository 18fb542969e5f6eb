#!/bin/bash
if grep -qx 'tiny-tool 1.0' /app/out; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
