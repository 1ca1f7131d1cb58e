"""Local paths and URLs of object stores, and files besides checkpoints: event files, caches, JSON.

tensorstore is imported when the first URL is used.
"""
