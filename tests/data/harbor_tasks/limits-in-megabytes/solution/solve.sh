#!/bin/bash
ulimit -n >limit
