#!/bin/bash
sed -i 's/^verbose = off$/verbose = on/' /etc/tool.conf
