mkdir /data && cd /data && for n in 1 2 3; do echo $((n * 10)) >$n.txt; done
