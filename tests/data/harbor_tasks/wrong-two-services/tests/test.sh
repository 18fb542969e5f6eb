#!/bin/bash
if true; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
