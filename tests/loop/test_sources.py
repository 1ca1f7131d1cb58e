"""`open_source`: the order and the position of batches from all kinds of sources."""

import itertools
import json

import numpy as np
import pytest
from sources import Indexed, numbers

from jstep.data.loaders import open_source
from jstep.data.positions import SavedPosition
from jstep.stores.tagged_json import as_json


@pytest.mark.parametrize("end", [4, 0])
def test_a_sequence_without_a_length_ends_with_index_error(end):
    assert numbers(Indexed(end)) == [10 * i for i in range(end)]


def test_a_sequence_ends_at_its_length():
    assert numbers([0, 10, 20]) == [0, 10, 20]
    assert numbers((0, 10, 20), start=2) == [20]
    assert numbers([0, 10], start=5) == []
    assert numbers(list(np.arange(6).reshape(3, 2)), start=1) == [[2, 3], [4, 5]]


def test_an_index_error_within_a_known_length_is_raised():
    class Broken:
        def __len__(self):
            return 5

        def __getitem__(self, step):
            return [0, 1][step]

    with pytest.raises(IndexError):
        numbers(Broken())


def test_generators_and_iterables_continue_from_their_position():
    numbers_left = iter(range(10))
    next(numbers_left)
    assert numbers((x for x in numbers_left), start=0)[:3] == [1, 2, 3]
    assert numbers({5: None}.keys()) == [5]


def test_a_grain_loader():
    grain = pytest.importorskip("grain")

    def make():
        return grain.MapDataset.range(50).shuffle(seed=3).batch(4).to_iter_dataset()

    expected = [np.asarray(x).tolist() for x in itertools.islice(make(), 6)]
    source = open_source(make(), 0, 100, is_saved=True, next_save=lambda number: number)
    assert [next(source.items).tolist() for _ in range(3)] == expected[:3]
    saved = json.loads(json.dumps(as_json(source.read_position())))
    next(source.items)
    resumed = open_source(make(), 3, 100, SavedPosition(saved))
    assert [next(resumed.items).tolist() for _ in range(3)] == expected[3:]


class IndexedAndIterable(Indexed):
    """A sequence of batches that also has `__iter__`, which must not be used."""

    def __iter__(self):
        raise AssertionError("it is indexed")


def test_objects_with_an_item_for_the_first_step_are_indexed():
    batches = IndexedAndIterable()
    assert numbers(batches, 3, 6) == [30, 40, 50]
    assert batches.requested == [3, 4, 5]
    assert numbers(IndexedAndIterable(end=2)) == [0, 10]
    assert numbers(IndexedAndIterable(end=2), start=2) == []
    batches = IndexedAndIterable()
    assert numbers(batches, 6, 6) == []
    assert batches.requested == []
