"""Measures what the control plane costs; see README.md beside this file and docs/benchmarks.md for figures."""
