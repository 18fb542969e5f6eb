#!/bin/bash
find project -name "*.bak" -delete
