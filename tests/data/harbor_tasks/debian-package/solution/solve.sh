#!/bin/bash
tiny-tool >out
