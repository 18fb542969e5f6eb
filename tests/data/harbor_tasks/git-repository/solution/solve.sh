#!/bin/bash
echo hello >notes.txt; git add notes.txt; git commit -q -m 'add notes'
