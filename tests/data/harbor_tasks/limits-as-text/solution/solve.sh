#!/bin/bash
echo ok >ok
