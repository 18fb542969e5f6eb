#!/bin/bash
./tool >result.txt
