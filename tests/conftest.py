"""What must hold before any test runs."""

import os
import signal

# Whoever runs the suite in the background of a script makes it ignore Ctrl-C, and so every run it starts: the tests of
# Ctrl-C would wait for ever. A handler, unlike an ignored signal, is not handed on to a program that is started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same on every machine: what only a GPU can show is in benchmarks/gpu_check.py.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Encoders divide images between threads, and tests of that say how many there are; two cores are soon oversubscribed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
