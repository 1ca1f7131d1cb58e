"""The record of runs: what each start was given and how it went, its files, and the comparison of two starts."""
