"""Input from threads: queues, QueueRunners that fill them, and a Coordinator that stops them together."""
