#!/bin/bash
if [ "$(cat /data/even)" = 250 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
