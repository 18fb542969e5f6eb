#!/bin/bash
if [ ! -e /app/secret.txt ] && grep -qx kept.txt /app/list && ! grep -q secret /app/list; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
