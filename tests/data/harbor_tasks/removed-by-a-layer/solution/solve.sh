#!/bin/bash
if [ -e /etc/legacy.conf ]; then echo yes; else echo no; fi >answer
