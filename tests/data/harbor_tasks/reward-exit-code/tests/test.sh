#!/bin/bash
test -d /app/build
