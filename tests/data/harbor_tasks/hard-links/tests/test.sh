#!/bin/bash
if [ ! -e /data/x ] && [ "$(cat /data/y /data/z)" = "$(printf 'old\nold')" ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
