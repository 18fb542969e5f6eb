#!/bin/bash
cat ?.txt | awk '{s+=$1} END {print s}' >sum
