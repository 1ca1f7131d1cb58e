"""A loader with a position, as runs save it and set it again."""


class Positioned:
    """An iterator over `batch(0), batch(1), …`; its position is the number that it has returned.

    Args:
        batch: The batch of a number.
        kind: The type of the position: int, bytes or dict.
        end: The number of batches; by default it has no end.
    """

    def __init__(self, batch, kind=dict, end=None):
        self.at, self.batch, self.kind, self.end = 0, batch, kind, end

    def __next__(self):
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        return self.batch(self.at - 1)

    def get_state(self):
        return {int: self.at, bytes: b"%d" % self.at, dict: {"at": self.at}}[self.kind]

    def set_state(self, state):
        self.at = int(state["at"] if self.kind is dict else state)
