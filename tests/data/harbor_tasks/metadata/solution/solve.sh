#!/bin/bash
echo metadata >word
