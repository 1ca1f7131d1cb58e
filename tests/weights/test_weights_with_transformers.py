"""A tiny GPT-2 of `transformers`, loaded into JAX and exported again, gives the same logits."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(0).integers(0, 50, (2, 7))
HEADS, WIDTH, LAYERS = 4, 32, 2


@pytest.fixture(autouse=True)
def ignore_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.float().numpy()


def norm(x, weight, bias):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight + bias


def attention(q, k, v, mask):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1), v
    )


def gpt2_init():
    f = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layer = {
        "norm1": {"weight": f((WIDTH,)), "bias": f((WIDTH,))},
        "qkv": {"kernel": f((WIDTH, 3 * WIDTH)), "bias": f((3 * WIDTH,))},
        "out": {"kernel": f((WIDTH, WIDTH)), "bias": f((WIDTH,))},
        "norm2": {"weight": f((WIDTH,)), "bias": f((WIDTH,))},
        "up": {"kernel": f((WIDTH, 4 * WIDTH)), "bias": f((4 * WIDTH,))},
        "down": {"kernel": f((4 * WIDTH, WIDTH)), "bias": f((WIDTH,))},
    }
    final = {"weight": f((WIDTH,)), "bias": f((WIDTH,))}
    return {
        "embed": f((50, WIDTH)),
        "positions": f((16, WIDTH)),
        "layers": [layer] * LAYERS,
        "norm": final,
    }


def gpt2_name(path):
    """Return the name in `transformers`, which stores the kernels of GPT-2 as (in, out), as we
    do."""
    outer = {"embed": "transformer.wte.weight", "positions": "transformer.wpe.weight"}
    if path in outer:
        return outer[path]
    inner = {"norm1": "ln_1", "qkv": "attn.c_attn", "out": "attn.c_proj", "norm2": "ln_2"}
    inner |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    *layer, kind, leaf = path.split("/")
    leaf = "bias" if leaf == "bias" else "weight"
    return f"transformer.h.{layer[1]}.{inner[kind]}.{leaf}" if layer else f"transformer.ln_f.{leaf}"


def gpt2(params, tokens):
    time = tokens.shape[1]
    x = params["embed"][tokens] + params["positions"][None, :time]
    for layer in params["layers"]:
        h = norm(x, **layer["norm1"])
        q, k, v = jnp.split(h @ layer["qkv"]["kernel"] + layer["qkv"]["bias"], 3, axis=-1)
        heads = [y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v)]
        h = attention(*heads, jnp.tril(jnp.ones((time, time), bool))[None, None])
        x = x + h.reshape(x.shape) @ layer["out"]["kernel"] + layer["out"]["bias"]
        h = norm(x, **layer["norm2"])
        h = jax.nn.gelu(h @ layer["up"]["kernel"] + layer["up"]["bias"], approximate=True)
        x = x + h @ layer["down"]["kernel"] + layer["down"]["bias"]
    return norm(x, **params["norm"]) @ params["embed"].T


@pytest.fixture(scope="module")
def a_gpt2(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return folder, logits_of(model)


def test_gpt2_round_trip(a_gpt2, tmp_path):
    folder, expected = a_gpt2
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, P(*[None] * (len(leaf.shape) - 1), "data")),
        ),
        gpt2_init(),
    )
    params = jstep.load_weights(folder, shapes, gpt2_name)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        logits = jax.jit(gpt2)(params, TOKENS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)

    transformers.AutoConfig.from_pretrained(folder).save_pretrained(tmp_path)
    for limit in (5 * 2**30, 50_000):
        jstep.save_weights(tmp_path / "model.safetensors", params, gpt2_name, max_shard_bytes=limit)
        reloaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert not info["mismatched_keys"]
        assert set(info["missing_keys"]) <= {"lm_head.weight"}  # tied
        assert not info["unexpected_keys"]
        np.testing.assert_array_equal(logits_of(reloaded), expected)
