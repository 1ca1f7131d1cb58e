"""Exact evaluation and metric-driven callbacks."""
