#!/bin/bash
if grep -qx 'ref: refs/heads/dev' /repo/.git/HEAD; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
