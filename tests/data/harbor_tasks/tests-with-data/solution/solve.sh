#!/bin/bash
LC_ALL=C sort words >sorted
