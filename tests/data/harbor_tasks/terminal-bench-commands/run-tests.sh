#!/bin/bash
grep -qx 2026 /app/copy
