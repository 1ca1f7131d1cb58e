"""How do threads feed each other?

- `coordinator`: the Coordinator, which stops threads together.
- `queue_runner`: QueueRunner: threads that feed a queue, and named collections of runners.
- `queues`: bounded queues with TensorFlow's semantics.
"""
