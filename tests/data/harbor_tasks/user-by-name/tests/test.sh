#!/bin/bash
if [ "$(cat /home/agent/who.txt)" = 1000 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
