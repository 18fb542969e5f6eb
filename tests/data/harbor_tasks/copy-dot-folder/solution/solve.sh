#!/bin/bash
sed -i s/main/dev/ .git/HEAD
