#!/bin/bash
if [ "$(cat /data/sum)" = 60 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
