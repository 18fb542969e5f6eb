#!/bin/bash
(for n in 1 2 3 4 5; do echo beat >>beats; sleep 0.05; done) &
wait
