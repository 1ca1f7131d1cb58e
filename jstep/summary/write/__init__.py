"""From summaries to event files: a writer, its thread, and the protos that it makes."""
