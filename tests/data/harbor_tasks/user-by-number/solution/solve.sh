#!/bin/bash
echo mine >>notes.txt
