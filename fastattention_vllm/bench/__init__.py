"""Side-by-side measurements of our kernels, of other people's and of what the machine can do at all.

Used by: `fastattention bench`, the scripts of benchmarks/, and the doctor (machine.py, ranks.py). Nothing here is
imported when a model is served.
"""
