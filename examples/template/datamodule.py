"""The data: 1,797 handwritten digits of 8 × 8 pixels, which come with scikit-learn."""

import numpy as np
from sklearn.datasets import load_digits

import jstep


class Digits:
    """Batches for training, validation and test.

    Args:
        batch_size: Rows of an update, over all devices.
        seed: Of the order of the rows. The split is always the same.
    """

    def __init__(self, batch_size, seed):
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        rows = (images / 16).astype(np.float32)[order], labels.astype(np.int32)[order]
        self.rows = {
            name: tuple(array[part] for array in rows)
            for name, part in (
                ("train", slice(0, 1200)),
                ("val", slice(1200, 1500)),
                ("test", slice(1500, None)),
            )
        }
        self.batch_size, self.seed = batch_size, seed

    def train(self, limit=None, shuffle=True):
        return jstep.batches(
            self.part("train", limit), self.batch_size, seed=self.seed, shuffle=shuffle
        )

    def one_pass(self, name, limit=None):
        """All rows of a part in order; the last batch may be smaller."""
        return jstep.batches(
            self.part(name, limit),
            self.batch_size,
            shuffle=False,
            num_epochs=1,
            drop_remainder=False,
        )

    def part(self, name, limit):
        """The first rows: of `limit` batches if it is an integer, a fraction if a float, or all."""
        rows = self.rows[name]
        if limit is None:
            return rows
        count = int(limit * len(rows[0])) if isinstance(limit, float) else limit * self.batch_size
        return tuple(array[:count] for array in rows)
