#!/bin/bash
if grep -qx 'verbose = on' /etc/tool.conf && grep -qx 'color = on' /etc/tool.conf; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
