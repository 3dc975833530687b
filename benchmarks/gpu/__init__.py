"""Benchmarks that need GPUs: the same application, the same bursts, a model of a real size with random weights.

`python -m benchmarks.gpu.random_model DIR` makes that model.
"""
