"""Reading event files, as events or as series of scalars."""
