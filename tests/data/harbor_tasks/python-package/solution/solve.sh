#!/bin/bash
python3 -c 'import tiny_sums; print(tiny_sums.add(19, 23))' >sum.txt
