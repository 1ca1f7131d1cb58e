"""Access to local paths and URLs of object stores, and reading of event files. Independent of checkpoints.

tensorstore is imported when the first URL is used.
"""
