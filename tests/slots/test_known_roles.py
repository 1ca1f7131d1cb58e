"""What is known of slots: their roles, under prefixes and joined, and what a state carries of
them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from jstep.slots import roles as slot_roles
from jstep.slots.roles import NO_ROLES, ActsByStep, CountedSlot, Role, Roles, infer_roles

WRAPPER = ActsByStep("update_every(2)", frozenset({("w",)}))
FULL = Roles(
    {"m": None, "v": Role.ROWS, "age": Role.PRIVATE_AGE, "last": Role.LAST_FINITE},
    holds={"m": "mean"},
    halves={"m": "m_scale"},
    formats={"compact"},
    misplaced={"last"},
    arguments={"v": "rate"},
    averages={"m"},
    computing={"v"},
    in_order={"m"},
    per_step={"v"},
    by_step={WRAPPER},
    counted={CountedSlot("age", "m"), CountedSlot("age", "v", ("w",))},
    injected={"last"},
    frozen={1},
)


def test_roles_under_a_prefix_and_joined():
    assert vars(FULL.prefixed("a")) == {
        "roles": {
            "a/m": None,
            "a/v": Role.ROWS,
            "a/age": Role.PRIVATE_AGE,
            "a/last": Role.LAST_FINITE,
        },
        "complete": True,
        "holds": {"a/m": "mean"},
        "halves": {"a/m": "a/m_scale"},
        "formats": {"compact"},
        "misplaced": {"a/last"},
        "arguments": {"a/v": "rate"},
        "averages": {"a/m"},
        "computing": {"a/v"},
        "in_order": {"a/m"},
        "per_step": {"a/v"},
        "by_step": {WRAPPER},
        "counted": {CountedSlot("a/age", "a/m"), CountedSlot("a/age", "a/v", ("w",))},
        "injected": {"a/last"},
        "frozen": {1},
    }
    for one, other in ((FULL, Roles()), (Roles(), FULL)):
        assert vars(one.merge(other)) == vars(FULL)
    both = Roles({"x": None}, complete=False, formats={"m_dtype"}).merge(FULL)
    assert (list(both), both.complete, both.formats) == (
        ["x", *FULL],
        False,
        {"compact", "m_dtype"},
    )


def test_roles_that_are_changed():
    assert FULL.with_format("m_dtype").formats == {"compact", "m_dtype"}
    assert FULL.with_misplaced(Role.ROWS).misplaced == {"last", "v"}
    assert FULL.with_order().in_order == set(FULL)
    assert Roles({"n": Role.AGE}).with_private_age()["n"] is Role.PRIVATE_AGE
    carried = FULL.static_part()
    assert carried["age"] is Role.AGE
    for name in ("halves", "arguments", "averages", "computing", "counted", "injected"):
        assert getattr(carried, name) == getattr(FULL, name)
    for name in ("holds", "formats", "misplaced", "in_order", "per_step", "by_step", "frozen"):
        assert not getattr(carried, name)
    assert FULL.names_with(Role.ROWS, Role.LAST_FINITE) == ["v", "last"]
    assert [name for name in FULL if FULL.has_one_value(name)] == ["age", "last"]


def test_equal_roles_are_an_equivalence_relation():
    changes = [
        {field.name: {"x": "y"}} for field in dataclasses.fields(Roles) if field.name != "complete"
    ]
    values = [FULL, Roles(), NO_ROLES, FULL.static_part(), Roles(complete=False)]
    values += [dataclasses.replace(FULL, **change) for change in changes]
    values += [
        Roles({"m": role, "age": Role.AGE}) for role in (None, Role.ROWS, Role.COPY, Role.AVERAGE)
    ]
    values += [dataclasses.replace(value) for value in values]
    for a, b in itertools.product(values, repeat=2):
        assert [a == b, b == a] == [vars(a) == vars(b)] * 2
        assert hash(a) == hash(b) if a == b else True
        assert all((a == c) == (b == c) for c in values if a == b)
    assert dict(FULL) != FULL
    assert repr(FULL) == "Roles(m, v, age, last)"
    assert slot_roles.roles_in(FULL) is slot_roles.roles_in(3) is NO_ROLES


def test_slots_of_a_single_leaf_are_told_from_values_of_all():
    """By those that two such leaves get; where these cannot be made, counts are of all, and nothing
    else."""
    leaf = jnp.ones(3)

    def make(params):
        return {
            "m": jax.tree.map(jnp.zeros_like, params),
            "n": jnp.int32(0),
            "d": jnp.float32(1),
            "c": params,
        }

    def fail(params):
        raise TypeError

    known = {"c": Role.COPY}
    slots = make(leaf)
    assert dict(infer_roles(slots, leaf, known, make)) == {
        "m": None, "n": Role.SHARED, "d": Role.SHARED, "c": Role.COPY,
    }  # fmt: skip
    assert dict(infer_roles(slots | {"p": 3.0}, leaf, known, fail)) == {
        "m": None, "n": Role.SHARED, "d": None, "c": Role.COPY, "p": None,
    }  # fmt: skip
    params = {"w": leaf}
    assert dict(infer_roles(make(params), params, {}, fail)) == {
        "m": None, "n": Role.SHARED, "d": Role.SHARED, "c": None,
    }  # fmt: skip
