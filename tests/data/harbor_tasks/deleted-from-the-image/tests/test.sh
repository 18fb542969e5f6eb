#!/bin/bash
if [ ! -e /var/lib/tool/lock ] && [ -e /var/lib/tool/data ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
