#!/bin/bash
awk '$1 % 2 == 0' numbers | wc -l >even
