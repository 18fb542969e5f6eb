#!/bin/bash
if cd /repo && [ "$(git log -1 --format=%s)" = "add notes" ] && [ "$(git show HEAD:notes.txt)" = hello ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
