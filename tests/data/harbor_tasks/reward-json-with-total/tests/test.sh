#!/bin/bash
r=0
grep -qx hello /app/hello && r=1
printf '{"reward": %d, "lines": 3}\n' $r >/logs/verifier/reward.json
