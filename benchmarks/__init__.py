"""Side-by-side measurements: this project, torchft (0.2.0 and a nightly) and plain DDP, in the same run.

`python -m benchmarks.run` takes all of them and writes `results/` (raw samples as JSON, a plot for
each) and the tables in README.md. No figure in this folder is typed by hand.
"""
