#!/bin/bash
if grep -qx hello /app/hello; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
