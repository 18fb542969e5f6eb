#!/bin/bash
if grep -qx ok /app/ok; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
