"""The checkpoint format: manifest, leaves, and how leaves are stored and matched."""
