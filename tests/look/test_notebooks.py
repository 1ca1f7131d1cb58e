"""HTML in notebooks: tables of states, plans, costs and goodput."""

import html.parser

import jax.numpy as jnp
import numpy as np

import jstep

OPTIMIZER = jstep.adam(jstep.linear_warmup(0.1, 10))


def my_loss(params, x):
    return jnp.mean((x @ params["<w>"]) ** 2)


STEP = jstep.minimize(my_loss, OPTIMIZER)


def make_state(model_state=None):
    return jstep.TrainState.create({"<w>": jnp.ones((4, 2))}, OPTIMIZER, model_state=model_state)


class TableParser(html.parser.HTMLParser):
    """A parser that collects the cells of each row, and fails if tags are not nested correctly."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open, self.words = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_state_table():
    found = TableParser(make_state({"a & b": jnp.ones(3)})._repr_html_())
    assert found.words[0] == "TrainState at step 0: 8 parameters"
    assert [row[0] for row in found.rows] == ["", "params", "m", "model_state", "start_step", "v"]
    assert found.rows[1][1:] == ["1", "32 B"]


def test_goodput_table():
    found = TableParser(
        jstep.Goodput(productive=70.0, starting=20.0, down=10.0, starts=2, steps=1000)._repr_html_()
    )
    assert found.rows == [
        ["productive", "70.000 s", "70.0 %"],
        ["starting", "20.000 s", "20.0 %"],
        ["down", "10.000 s", "10.0 %"],
    ]
    assert found.words[0] == "goodput 70.0 %: 1000 steps in 100 s, 2 starts"
    assert TableParser(jstep.Goodput()._repr_html_()).rows == []


def plan():
    data = jstep.batches(np.ones((20, 4)), {0: 2, 5: 4})
    hooks = [jstep.LoggingHook(every_n_steps=5)]
    return jstep.plan(
        OPTIMIZER, 20, hooks=hooks, points=3, train_step={0: STEP, 9: STEP}, batches=data
    )


def test_plan_table():
    found = TableParser(plan()._repr_html_())
    assert found.rows[0] == ["step", "learning_rate"]
    assert len(found.rows) == 4
    text = " ".join(found.words)
    for part in (
        "constant: beta1 0.9",
        "0: my_loss, 9: my_loss",
        "0: 2, 5: 4",
        "LoggingHook: every 5 steps",
    ):
        assert part in text


# The `repr` of what looks at a run is its table, as at a prompt.


def test_the_repr_of_plan_cost_and_goodput_is_their_table():
    optimizer = jstep.adam(jstep.cosine_decay(0.1, 10))
    step = jstep.minimize(lambda params, x: (params["w"] * x).sum(), optimizer)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    plan = jstep.plan(optimizer, 10)
    assert "learning_rate" in repr(plan)
    tables = [
        plan,
        jstep.cost(step, state, jnp.ones(3)),
        jstep.Goodput(productive=3.0, starting=1.0, steps=5),
    ]
    for table in tables:
        assert repr(table) == str(table)
        assert "\n" in repr(table)
        assert type(table).__name__ not in repr(table)
