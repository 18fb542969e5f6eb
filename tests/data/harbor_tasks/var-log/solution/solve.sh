#!/bin/bash
grep -c ERROR /var/log/app.log >errors
