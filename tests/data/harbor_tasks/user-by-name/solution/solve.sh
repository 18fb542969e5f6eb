#!/bin/bash
id -u >who.txt
