#!/bin/bash
echo "$TIER" >tier.txt
