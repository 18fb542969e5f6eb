#!/bin/bash
if grep -qx 'hello world' /app/greeting; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
