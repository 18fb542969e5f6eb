#!/bin/bash
if [ "$(tail -n 1 /notes/notes.txt)" = mine ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
