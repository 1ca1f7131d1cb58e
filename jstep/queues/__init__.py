"""How do threads feed each other?

- `coordinator`: the Coordinator.
- `queue_runner`: QueueRunner, and collections of runners.
- `queues`: bounded queues with TensorFlow's semantics.
"""
