#!/bin/bash
if [ -s /app/limit ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
