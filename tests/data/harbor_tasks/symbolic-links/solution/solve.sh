#!/bin/bash
ln -sfn releases/2 current
