"""Atomic checkpoints of training states. It imports Orbax only when a Saver saves or restores."""
