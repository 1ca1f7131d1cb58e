"""Local paths and URLs of object stores, and files besides checkpoints: event files, the timeline, caches, JSON.

tensorstore is imported when the first URL is used.
"""
