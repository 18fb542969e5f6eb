#!/bin/bash
echo "$SERVICE_PORT" >/app/port.txt
