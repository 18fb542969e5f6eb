#!/bin/bash
echo x >x; echo y >y
