"""Benchmarks: each states its hypothesis, and prints what it found."""
