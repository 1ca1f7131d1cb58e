"""What a checkpoint is made of: its manifest, its leaves, and how they are stored."""
