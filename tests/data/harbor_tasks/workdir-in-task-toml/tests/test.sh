#!/bin/bash
if [ "$(cat /srv/app/where.txt)" = /srv/app ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
