#!/bin/bash
greet world >greeting
