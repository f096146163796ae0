"""A script whose timing_s/ metrics are CPU seconds of its process, for machines with other work: with one thread
(OMP_NUM_THREADS=1) they are what a free core would take. `python -m tests.bench.cpu_seconds distill.py FLAGS...`"""

import runpy
import sys
import time

if __name__ == "__main__":
    time.perf_counter = time.process_time
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
