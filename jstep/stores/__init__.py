"""Local paths and URLs of object stores, and files besides checkpoints: event files, the record of runs, caches, JSON.

tensorstore is imported when the first URL is used.
"""
