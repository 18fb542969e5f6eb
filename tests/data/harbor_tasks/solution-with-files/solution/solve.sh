#!/bin/bash
cat /solution/list.txt >list
