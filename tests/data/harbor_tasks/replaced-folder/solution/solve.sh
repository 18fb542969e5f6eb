#!/bin/bash
ls /opt/plugins | sort >plugins
