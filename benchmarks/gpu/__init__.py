"""`make bench-gpu`: a decode cycle over random weights in published shapes, beside the floor that the hardware sets.

`python -m benchmarks.gpu --help` lists what can be chosen; docs/gpu.md says how to read the results.
"""
