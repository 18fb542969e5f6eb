#!/bin/bash
echo "$REGION" >region.txt
