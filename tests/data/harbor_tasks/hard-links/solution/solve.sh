#!/bin/bash
rm x
