"""The hash of a program depends on what it computes, not on its source."""

import functools
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jstep.core.jaxprs import program_hash, strip_addresses

X = jnp.ones((4, 3))


def digest(fn, *args):
    return program_hash(jax.make_jaxpr(fn)(*args))


def constant(value):
    return lambda x: x + value


def on_the_host(x):
    return np.asarray(x)


def with_callback(callback):
    def fn(x):
        jax.debug.print("sum {}", x.sum())
        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return fn


def kernel(x, out):
    out[...] = x[...] * 2


def everything(x):
    """Use each kind of operation whose parameters might refer to this process."""
    x = with_callback(on_the_host)(x)
    x = jax.lax.scan(lambda c, _: (jax.checkpoint(jax.nn.gelu)(c), None), x, None, length=3)[0]
    x = jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x)
    x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    x += pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    return x * jax.nn.relu(x) + jax.random.normal(jax.random.key(3), x.shape) + np.arange(3.0)[None]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 2, lambda x: x + 2),
        (lambda x: x - x * 2, lambda x: x * 2 - x),
        (constant(np.arange(3.0)[None]), constant(np.arange(3.0)[None, ::-1].copy())),
        (constant(jnp.arange(3.0)[None]), constant(jnp.arange(1.0, 4.0)[None])),
        (constant(np.float32(0.1)), constant(np.nextafter(np.float32(0.1), np.float32(1)))),
        (lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float16)),
        (lambda x: jnp.sum(x[:3], 0), lambda x: jnp.sum(x[:3], 1)),
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0],
         lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=4)[0]),
        (with_callback(on_the_host), with_callback(np.sin)),
        (with_callback(functools.partial(np.full_like, fill_value=1)),
         with_callback(functools.partial(np.full_like, fill_value=2))),
        (lambda x: (x, x * 2), lambda x: (x * 2, x)),
    ],
)  # fmt: skip
def test_the_hash_depends_on_the_computation(one, other):
    assert digest(one, X) == digest(one, X)
    assert digest(one, X) != digest(other, X)


def test_the_hash_tells_variables_apart():
    """An argument and a later result once had the same number."""

    def plus_argument(a, b, c):
        product = (a + b) * c
        return product + c

    def doubled(a, b, c):
        product = (a + b) * c
        return product + product

    assert digest(plus_argument, X, X, X) != digest(doubled, X, X, X)


def test_the_hash_depends_on_shapes_and_dtypes():
    assert len({digest(jnp.sin, x) for x in (X, X[:2], X.astype(jnp.bfloat16), X[None])}) == 4


def test_the_hash_ignores_names_and_source_locations():
    @jax.jit
    def scale(x):
        return x * 2

    def other_name(y):
        return y * 2

    assert digest(lambda x: scale(x) + 1, X) == digest(lambda z: jax.jit(other_name)(z) + 1, X)


def test_constants_of_all_dtypes():
    dtypes = [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4, np.bool_, np.complex64, np.uint8]
    values = [jnp.asarray([1, 0, 1]).astype(dtype) for dtype in dtypes]
    assert len({digest(constant_of(value), X) for value in values}) == len(dtypes)


def constant_of(value):
    return lambda x: (x, value)


def test_constants_of_several_processes_have_their_shape_and_dtype(monkeypatch):
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    kinds = [(8, float), (8, float), (16, float), (8, int)]
    one, same, longer, other = (
        jax.device_put(jnp.full(n, n + i, dtype), sharding) for i, (n, dtype) in enumerate(kinds)
    )
    closed = jax.make_jaxpr(constant_of(one))(X)
    (at,) = (i for i, const in enumerate(closed.consts) if const is one)

    def with_const(value):
        return program_hash(
            closed.replace(consts=[*closed.consts[:at], value, *closed.consts[at + 1 :]])
        )

    assert len(set(map(with_const, (one, same, longer, other)))) == 4
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    assert with_const(one) == with_const(same)
    assert len(set(map(with_const, (one, longer, other)))) == 3


def test_addresses_and_files_are_removed():
    text = strip_addresses(
        f"{functools.partial(kernel)!r} at /home/me/run/train.py:12:3 in C:/x/y.py"
    )
    assert text == "functools.partial(<function kernel at 0x>) at *.py in *.py"


CHILD = """
    import sys, jax, jstep
    sys.path.insert(0, sys.argv[1])
    import test_program_hash as t
    from jstep.core.jaxprs import program_hash
    print(program_hash(jax.make_jaxpr(t.everything)(t.X)))
"""


@pytest.mark.thorough
def test_the_hash_is_the_same_in_another_process(tmp_path):
    """The other process has another directory, another path of the source file and another hash
    seed."""
    (tmp_path / "elsewhere").mkdir()
    here = os.path.dirname(__file__)
    (tmp_path / "elsewhere" / "test_program_hash.py").write_text(
        "\n\n" + pathlib.Path(__file__).read_text()
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "elsewhere")],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONHASHSEED": "7",
            "PYTHONPATH": os.path.dirname(os.path.dirname(here)),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    sys.path.insert(0, here)
    try:
        import test_program_hash as same  # the name in the child
    finally:
        sys.path.remove(here)
    assert done.stdout.split() == [digest(same.everything, X)]
