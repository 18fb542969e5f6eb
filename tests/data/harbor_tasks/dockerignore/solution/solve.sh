#!/bin/bash
ls | sort >/tmp/list; cp /tmp/list list
