#!/bin/bash
echo "$LEVEL" >level.txt
