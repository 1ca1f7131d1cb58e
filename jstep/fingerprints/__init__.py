"""Fingerprints (64-bit hashes) of trees of arrays, and logs of fingerprints."""
