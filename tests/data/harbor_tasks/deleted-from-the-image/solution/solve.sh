#!/bin/bash
rm /var/lib/tool/lock
