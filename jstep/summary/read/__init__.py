"""Event files read back: as events, and as series of scalars."""
