#!/bin/bash
if grep -qx no /app/answer; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
