"""Access to local paths and URLs of object stores. Independent of checkpoints and event files.

tensorstore is imported when the first URL is used.
"""
