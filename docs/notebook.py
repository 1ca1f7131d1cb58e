"""Notebook outputs of jstep's objects: a script that makes them, a MkDocs hook that embeds them.

    python docs/notebook.py    # writes docs/notebook/*.html

A page has a line `<!-- notebook: state -->` where `docs/notebook/state.html` goes: the site is
built without running anything.
"""

import pathlib
import re
import tempfile
from typing import Any

SHOWN = pathlib.Path(__file__).parent / "notebook"
_PLACE = re.compile(r"^<!-- notebook: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """The page with the outputs in their places."""
    return _PLACE.sub(lambda match: embedded(match[1]), markdown)


def embedded(name: str) -> str:
    """A block of HTML on one line: Markdown leaves it as it is."""
    shown = " ".join((SHOWN / f"{name}.html").read_text(encoding="utf-8").split())
    return f'<div class="notebook-output">{shown}</div>'


def outputs() -> dict[str, str]:
    """Name → HTML: of the state of the first page of the tutorial, and of the run of the fifth."""
    import jax
    import jax.numpy as jnp

    import jstep

    params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}
    first = jstep.TrainState.create(params, jstep.adam(1e-2))

    rows = jax.random.normal(jax.random.key(0), (512, 3))
    data = jstep.batches(
        {"x": rows, "y": rows @ jnp.array([[1.0], [-2.0], [0.5]])}, batch_size=32, seed=0
    )
    optimizer = jstep.adamw(jstep.warmup_cosine_decay(3e-2, 20, 300))
    train_step = jstep.minimize(
        lambda p, batch: jnp.mean((batch["x"] @ p["w"] - batch["y"]) ** 2), optimizer
    )

    def make_state() -> jstep.TrainState:
        return jstep.TrainState.create({"w": jnp.zeros((3, 1))}, optimizer)

    with tempfile.TemporaryDirectory() as run:
        jstep.train(
            train_step, make_state(), data, 300,
            checkpoint_dir=run, save_checkpoint_steps=100, progress=False,
        )  # fmt: skip
        goodput = jstep.goodput(run)
    shown = {
        "state": first,
        "plan": jstep.plan(optimizer, last_step=300, hooks=[jstep.NanLossHook()]),
        "cost": jstep.cost(train_step, make_state(), data[0]),
        "goodput": goodput,
    }
    return {name: what._repr_html_() for name, what in shown.items()}


if __name__ == "__main__":
    SHOWN.mkdir(exist_ok=True)
    for name, shown in outputs().items():
        (SHOWN / f"{name}.html").write_text(shown + "\n", encoding="utf-8")
