#!/bin/bash
echo hello >hello
