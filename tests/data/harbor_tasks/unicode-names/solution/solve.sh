#!/bin/bash
cat data/größe.txt >size
