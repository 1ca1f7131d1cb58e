"""Mixtures: rows, order, weights, processes, sources, and a run."""

import itertools
import math
import pickle
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_rows import Items, same
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

import jstep
from jstep.data import permutation
from jstep.data.batches import Batches, batches, mixture
from jstep.data.proportions import count_stages
from jstep.data.sequence import next_change

A, B, C = np.arange(30), np.arange(100, 107), np.arange(200, 201)
SOURCES = {"a": A, "b": B, "c": C}
WEIGHTS = {
    0: {"a": 3, "b": 2, "c": 0},
    20: {"a": 0.1, "b": 0.0, "c": 0.3},
    35: {"a": 1, "b": 1, "c": 1},
}
FIRST = [[13, 101, 9, 105], [1, 103, 100, 18], [103, 18, 105, 25]]


def rows_of(source, rows):
    """Return the rows of a list of batches that come from a source."""
    return [int(row) for row in np.concatenate(rows) if row // 100 == source[0] // 100]


def test_each_source_is_read_in_epochs():
    mix = mixture(SOURCES, 6, WEIGHTS, seed=1)
    seen = list(mix[:80])
    for name, source in SOURCES.items():
        rows = rows_of(source, seen)
        assert mix.rows_before(80)[name] == len(rows)
        epochs = [
            rows[i : i + len(source)] for i in range(0, len(rows) - len(source) + 1, len(source))
        ]
        assert len(epochs) > 2
        assert all(sorted(epoch) == source.tolist() for epoch in epochs)
        assert len(source) == 1 or epochs[0] != epochs[1] != source.tolist()


def test_sources_are_mixed_but_in_order_without_shuffle():
    seen = list(mixture(SOURCES, 6, WEIGHTS, shuffle=False)[:80])
    for source in SOURCES.values():
        rows = rows_of(source, seen)
        assert rows == list(itertools.islice(itertools.cycle(source.tolist()), len(rows)))
    assert any(batch.tolist() != sorted(batch.tolist()) for batch in seen)


@examples(40)
@given(
    st.dictionaries(st.integers(1, 20), st.integers(1, 5), max_size=3),
    st.dictionaries(
        st.integers(1, 20),
        st.tuples(*[st.sampled_from([0, 1, 1e-6, 0.7, 12])] * 3).filter(any),
        max_size=3,
    ),
)
def test_counts_follow_weights_and_batch_sizes(sizes, weights):
    sizes, weights = {0: 3, **sizes}, {0: (1, 2, 0), **weights}
    mix = mixture(
        SOURCES, sizes, {step: dict(zip("abc", w, strict=True)) for step, w in weights.items()}, 1
    )
    ideal = np.zeros(3)
    for step in range(30):
        size, now = (
            stages[max(first for first in stages if first <= step)] for stages in (sizes, weights)
        )
        before, after = mix.rows_before(step), mix.rows_before(step + 1)
        taken = [after[name] - before[name] for name in "abc"]
        assert taken == [len(rows_of(source, [mix[step]])) for source in SOURCES.values()]
        assert sum(taken) == size == mix.batch_size_at(step)
        assert all(weight or not count for count, weight in zip(taken, now, strict=True))
        ideal += np.array(now) / sum(now) * size
        assert np.abs(ideal - [after[name] for name in "abc"]).max() < 1 + 1e-9  # (3 - 1) / 2


def test_equal_stages_are_merged():
    one = mixture(SOURCES, 6, {"a": 3, "b": 2, "c": 1})
    many = mixture(
        SOURCES, {0: 6, 7: 6}, {0: {"a": 3, "b": 2, "c": 1}, 11: {"a": 1.5, "b": 1, "c": 0.5}}
    )
    assert same(list(one[:40]), list(many[:40]))


def test_order_of_a_source_does_not_depend_on_the_others():
    mixes = [
        mixture({"a": A, "b": B}, 5, {"a": 1, "b": 1}, 3)[:40],
        mixture({"0": C, "b": B, "a": A}, 8, {"b": 1, "a": 1, "0": 3}, 3)[:70],
        mixture({"a": A}, 3, {"a": 1}, 3)[:20],
    ]
    for source in (A, B):
        orders = [rows_of(source, list(mix)) for mix in mixes if rows_of(source, list(mix))]
        assert len({tuple(order[:50]) for order in orders}) == 1
    assert rows_of(A, list(mixes[2])) != rows_of(A, list(mixture({"x": A}, 3, {"x": 1}, 3)[:20]))


@pytest.mark.thorough(except_for=["False-2"])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("shuffle", [True, False])
def test_processes_split_one_global_batch(count, shuffle):
    sizes = {0: 6, 25: 12}
    full = mixture(SOURCES, sizes, WEIGHTS, 1, shuffle=shuffle)
    parts = [
        mixture(SOURCES, sizes, WEIGHTS, 1, shuffle=shuffle, process_index=i, process_count=count)
        for i in range(count)
    ]
    for step, joined in enumerate(zip(*[part[:50] for part in parts], strict=True)):
        assert {len(part) for part in joined} == {len(full[step]) // count}
        assert np.array_equal(np.concatenate(joined), full[step])
    assert np.array_equal(np.concatenate([part[10**9] for part in parts]), full[10**9])


def test_mixture_at_large_steps():
    mix = mixture(
        SOURCES,
        {0: 6, 10**12: 60},
        {0: {"a": 1e-6, "b": 1, "c": 0.3}, 10**11: {"a": 0.7, "b": 0.2, "c": 0.1}},
    )
    far = 10**12 + 10**6
    assert len(mix[far]) == 60
    before, after = mix.rows_before(far), mix.rows_before(far + 1)
    assert sum(before.values()) == 6 * 10**12 + 60 * 10**6
    assert {name: after[name] - before[name] for name in before} == {
        name: len(rows_of(source, [mix[far]])) for name, source in SOURCES.items()
    }


def test_slices_and_skips():
    mix = mixture(SOURCES, {0: 6, 30: 9}, WEIGHTS)
    walked = list(mix[:60])
    view = mix.skip(5, 25)[3:]
    assert same(list(view[:20]), [*walked[3:5], *walked[25:43]])
    assert view.batch_size == {0: 6, 7: 9}
    assert next_change(view, 0) == 7
    assert next_change(view, 7) is None
    for cut, steps in (
        (view, [3, 4, *range(25, 60)]),
        (mix[40::-3], [*range(40, 0, -3)]),
        (mix[9:3:-1], [*range(9, 3, -1)]),
    ):
        rows = [walked[step] for step in steps[:6]]
        assert cut.rows_before(6) == {
            name: len(rows_of(source, rows)) for name, source in SOURCES.items()
        }
    assert mix.rows_before(0) == {"a": 0, "b": 0, "c": 0}
    with pytest.raises(TypeError, match="no end"):
        len(view)
    with pytest.raises(IndexError, match="step=-1"):
        mix[-1]
    with pytest.raises(IndexError, match="step=20"):
        view[:20][20]
    with pytest.raises(ValueError, match="must have start < stop"):
        mix.skip(3, 3)


def test_properties_and_repr():
    mix = mixture(SOURCES, 6, WEIGHTS, seed=4)
    assert mix.num_rows == {"a": 30, "b": 7, "c": 1}
    assert mix.batch_size == 6
    assert mix.weights() == {
        0: {"a": 0.6, "b": 0.4, "c": 0.0},
        20: {"a": 0.25, "b": 0.0, "c": 0.75},
        35: dict.fromkeys("abc", 1 / 3),
    }
    assert batches(A, 3).weights() == {}
    assert repr(mix) == (
        "<Mixture of 6 from a (30 rows), b (7 rows), c (1 rows), shuffled by seed 4, without end>"
    )
    assert not isinstance(mix, Batches)
    assert mix
    assert same(pickle.loads(pickle.dumps(mix))[7], mix[7])


def test_mixture_order_is_stable_across_versions():
    """A change of the order would change the results of every run."""
    mix = mixture(SOURCES, 4, {"a": 1, "b": 1, "c": 0}, seed=42)
    assert [mix[i].tolist() for i in (0, 1, 1000)] == FIRST


EVEN = {"a": 1, "b": 1}


def test_datasets_and_arrays_of_one_structure():
    """A dataset whose items are dicts can be mixed with a dict of arrays."""
    items, arrays = Items(50), {"x": -np.ones((20, 2), int), "y": -np.ones(20)}
    batch = mixture({"a": items, "b": arrays}, 10, EVEN)[0]
    assert sorted(batch) == ["x", "y"]
    assert (batch["y"] < 0).sum() == 5
    assert np.array_equal(batch["x"][:, 0], batch["y"])


def test_process_reads_only_its_items():
    items = [Items(50), Items(40)]
    mix = mixture(dict(zip("ab", items, strict=True)), 8, EVEN, process_index=1, process_count=4)
    for source in items:
        source.requested.clear()
    assert len(mix[5]["y"]) == 2
    # One more per source tests whether it takes lists.
    assert sum(len(source.requested) for source in items) <= 4


def test_prng_keys_and_jax_arrays():
    keys = {name: jax.random.split(jax.random.key(seed), 6) for seed, name in enumerate("ab")}
    mix = mixture(
        {name: {"key": keys[name], "x": jnp.arange(6) + 10 * i} for i, name in enumerate("ab")},
        4,
        EVEN,
    )
    batch = mix[2]
    both = np.concatenate([jax.random.key_data(keys[name]) for name in "ab"])
    want = both[[x if x < 6 else x - 4 for x in batch["x"]]]
    assert np.array_equal(jax.random.key_data(batch["key"]), want)


def test_rows_of_different_shapes():
    # A row of 1 would be repeated to fill one of 3.
    ragged = [np.zeros(3 if i < 4 else 1) for i in range(8)]
    data = mixture({"a": np.zeros((8, 3)), "b": ragged}, 2, EVEN, shuffle=False)
    assert data[3].shape == (2, 3)
    with pytest.raises(
        ValueError,
        match=r"sources: must have rows of one shape, .*3.* of 'a', .*1.* of 'b'",
    ):
        data[4]


def test_train_uses_batch_n_at_step_n_after_a_restart(tmp_path):
    mix, seen = (
        mixture({"a": A, "b": B}, 4, {0: {"a": 1, "b": 1}, 5: {"a": 1, "b": 0}}).skip(2, 4),
        [],
    )

    def step(state, batch):
        seen.append(batch.tolist())
        return state.replace(global_step=state.global_step + 1), {"loss": jnp.float32(0)}

    for last_step in (3, 8):
        state = jstep.TrainState.create({"w": 0.0}, jstep.gradient_descent(0.1))
        jstep.train(step, state, mix, last_step, checkpoint_dir=tmp_path, progress=False)
    assert seen == [batch.tolist() for batch in mix[:8]]


# The number of rows per source of a mixture: a row-by-row reference.


def normalize(weights):
    exact = [Fraction(w) for w in weights]
    return tuple(w / sum(exact) for w in exact)


SOME = st.sampled_from([0, 0, 1e-6, 1e-300, 1, 1, 0.3, 0.7, math.pi, 2**-0.5, 1e6])
WEIGHT = SOME | st.floats(0, 10)


@examples(60)
@given(st.lists(WEIGHT, min_size=1, max_size=10).filter(any), st.integers(0, 10**30))
def test_rows_of_one_stage_follow_virtual_times(weights, far):
    """Row j of a source has the virtual time (2j + 1) / (2w); rows are taken in that order."""
    exact = normalize(weights)
    counts = count_stages([(0, exact)])
    found = [0] * len(weights)
    for rows in range(50):
        assert counts.value_at(rows).counts(rows) == tuple(found)
        due = [
            (Fraction(2 * c + 1) / (2 * w), s)
            for s, (c, w) in enumerate(zip(found, exact, strict=True))
            if w
        ]
        found[min(due)[1]] += 1
    assert all(
        abs(c - far * w) <= Fraction(len(weights) - 1, 2)
        for c, w in zip(counts.value_at(far).counts(far), exact, strict=True)
    )


@pytest.mark.thorough
def test_integers_stay_small_with_many_stages():
    stages = [
        (10 * i, normalize([0.1 + 0.7 / (i + 1), 0.3, math.sqrt(i + 2)])) for i in range(2000)
    ]
    for stage in count_stages(stages).values:
        for period in stage.periods:
            assert period.start.denominator.bit_length() < 1000
            assert max(period.excess, period.weight).bit_length() < 1000


# Rows back: which rows were in a step, and which steps hold a row, against a search through all
# steps.


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 1025, 70_000])
def test_the_inverse_of_a_permutation(n):
    domain = permutation.domain(n)
    keys = permutation.draw_keys(domain, 3, 5)
    numbers = permutation.permute(domain, keys, np.arange(n))
    assert (permutation.permute(domain, keys, numbers, inverse=True) == np.arange(n)).all()


def of(**options):
    options = {"batch_size": 4, "seed": 3, "num_epochs": 5} | options
    return jstep.batches(np.arange(23), **options)


BATCHES = {
    "rests": of(drop_remainder=False),
    "in order": of(shuffle=False),
    "sizes and rests": of(batch_size={0: 4, 3: 7, 9: 2}, drop_remainder=False),
    "large": of(batch_size=40, drop_remainder=False),
    "endless": of(num_epochs=None)[:40],
    "skipped": of().skip(3, 9).skip(5, 7),
    "backwards": of()[15:2:-2],
    "process": of(process_index=1, process_count=2),
}


@pytest.mark.parametrize("name", BATCHES)
def test_rows_and_steps(name):
    data = BATCHES[name]
    rows = [data.rows_of(step) for step in range(len(data))]
    if name != "process":
        assert all((found == data[step]).all() for step, found in enumerate(rows))
    for row in range(23):
        expected = [step for step, found in enumerate(rows) if row in found]
        assert data.steps_of(row) == expected
        assert data.steps_of(row, 2, min(9, len(data))) == [
            step for step in expected if 2 <= step < 9
        ]


SOURCES_OF_ROWS = {"a": np.arange(11), "b": 100 + np.arange(7), "ab": 200 + np.arange(30)}
MIXTURES = {
    "plain": jstep.mixture(SOURCES_OF_ROWS, 8, {"a": 3, "b": 1, "ab": 2}, seed=1)[:40],
    "changing": jstep.mixture(
        SOURCES_OF_ROWS, {0: 8, 5: 4}, {0: {"a": 1, "b": 1, "ab": 0}, 9: {"a": 0, "b": 2, "ab": 5}}
    )[:40],
    "skipped": jstep.mixture(SOURCES_OF_ROWS, 8, {"a": 3, "b": 1, "ab": 2}).skip(2, 30)[:30],
    "in order": jstep.mixture(SOURCES_OF_ROWS, 8, {"a": 3, "b": 1, "ab": 2}, shuffle=False)[5:40:2],
}


@pytest.mark.thorough(except_for=["skipped", "in order"])
@pytest.mark.parametrize("name", MIXTURES)
def test_rows_and_steps_of_mixtures(name):
    data = MIXTURES[name]
    rows = [data.rows_of(step) for step in range(len(data))]
    for step, found in enumerate(rows):
        assert [SOURCES_OF_ROWS[source][row] for source, row in found] == data[step].tolist()
    for source, of_source in SOURCES_OF_ROWS.items():
        for row in range(len(of_source)):
            expected = [step for step, found in enumerate(rows) if (source, row) in found]
            assert data.steps_of(source, row) == expected
            assert data.steps_of(source, row, 3, 15) == [
                step for step in expected if 3 <= step < 15
            ]
