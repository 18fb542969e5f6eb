#!/bin/bash
if [ "$(tail -n 1 /srv/state)" = done ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
