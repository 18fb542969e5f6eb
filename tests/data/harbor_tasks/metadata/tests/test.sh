#!/bin/bash
if grep -qx metadata /app/word; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
