#!/bin/bash
echo done >>state
