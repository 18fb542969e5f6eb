#!/bin/bash
if [ -z "$(find /workspace/project -name "*.bak")" ] && [ -f /workspace/project/src/a.txt ] && [ -f /workspace/project/b.txt ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
