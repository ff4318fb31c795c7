"""Side-by-side measurements of the kernels against other people's and against what the machine can do at all."""
