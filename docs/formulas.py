r"""The equations of the reference in TeX: name of a function → equations of its entry.

An entry shows them below its first line. The docstrings have them as text, for `help()`. Symbols
are those of the docstrings: p is a parameter, g its gradient, lr the learning rate of the step, t
the age of the slots; a hat corrects an average for its age.
"""

_MOMENTS = (
    r"m \leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad v \leftarrow \beta_2 v + (1-\beta_2)\, g^2"
)
_HATS = r"\hat m = \frac{m}{1-\beta_1^t}, \qquad \hat v = \frac{v}{1-\beta_2^t}"

FORMULAS = {
    "gradient_descent": [r"p \leftarrow p - \mathrm{lr}\; g"],
    "momentum": [
        r"a \leftarrow \mathrm{momentum}\cdot a + g, \qquad p \leftarrow p - \mathrm{lr}\; a"
    ],
    "adagrad": [r"a \leftarrow a + g^2, \qquad p \leftarrow p - \mathrm{lr}\, \frac{g}{\sqrt{a}}"],
    "adadelta": [
        r"e \leftarrow \rho\, e + (1-\rho)\, g^2, \qquad "
        r"d = g\, \frac{\sqrt{x+\epsilon}}{\sqrt{e+\epsilon}}",
        r"x \leftarrow \rho\, x + (1-\rho)\, d^2, \qquad p \leftarrow p - \mathrm{lr}\; d",
    ],
    "adam": [
        _MOMENTS,
        r"p \leftarrow p - \mathrm{lr}\, \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} "
        r"\cdot \frac{m}{\sqrt{v}+\epsilon}",
    ],
    "adamw": [
        _MOMENTS,
        _HATS,
        r"p \leftarrow p - \mathrm{lr} "
        r"\left( \frac{\hat m}{\sqrt{\hat v}+\epsilon} + \lambda p \right)",
    ],
    "adabelief": [
        r"m \leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad "
        r"s \leftarrow \beta_2 s + (1-\beta_2)\, (g-m)^2 + \epsilon_{\mathrm{root}}",
        r"p \leftarrow p - \mathrm{lr}\, \frac{\hat m}{\sqrt{\hat s}+\epsilon}",
    ],
    "yogi": [
        r"v \leftarrow v - (1-\beta_2)\, \mathrm{sign}(v-g^2)\, g^2",
        r"p \leftarrow p - \mathrm{lr}\, \frac{\hat m}{\sqrt{\hat v}+\epsilon}",
    ],
    "lion": [
        r"p \leftarrow p - \mathrm{lr} "
        r"\left( \mathrm{sign}(\beta_1 m + (1-\beta_1)\, g) + \lambda p \right)",
        r"m \leftarrow \beta_2 m + (1-\beta_2)\, g",
    ],
    "lamb": [
        _MOMENTS,
        r"r = \frac{\hat m}{\sqrt{\hat v}+\epsilon} + \lambda p, \qquad "
        r"p \leftarrow p - \mathrm{lr}\, \frac{\Vert p \Vert}{\Vert r \Vert}\, r",
    ],
    "ademamix": [
        r"p \leftarrow p - \mathrm{lr} \left( "
        r"\frac{\hat m_1 + \alpha\, m_2}{\sqrt{\hat v}+\epsilon} + \lambda p \right)"
    ],
    "novograd": [
        r"v \leftarrow \beta_2 v + (1-\beta_2)\, \Vert g \Vert^2, \qquad "
        r"m \leftarrow \beta_1 m + \frac{g}{\sqrt{v}+\epsilon} + \lambda p",
        r"p \leftarrow p - \mathrm{lr}\; m",
    ],
    "signum": [
        r"m \leftarrow \beta m + (1-\beta)\, g, \qquad "
        r"p \leftarrow p - \mathrm{lr}\; \mathrm{sign}(m)",
    ],
    "exponential_decay": [r"\mathrm{lr}(N) = \mathrm{lr}_0 \cdot d^{\,N/T}"],
    "natural_exp_decay": [r"\mathrm{lr}(N) = \mathrm{lr}_0 \cdot e^{-d\, N/T}"],
    "inverse_time_decay": [r"\mathrm{lr}(N) = \frac{\mathrm{lr}_0}{1 + d\, N/T}"],
    "cosine_decay": [
        r"\mathrm{lr}(N) = \mathrm{lr}_0 "
        r"\left( (1-\alpha)\, \frac{1 + \cos(\pi \min(N, T)/T)}{2} + \alpha \right)"
    ],
    "inverse_sqrt_decay": [
        r"\mathrm{lr}(N) = \mathrm{lr}_{\max} "
        r"\cdot \min\left(1, \frac{N+1}{w}\right) \sqrt{\frac{w}{\max(N, w)}}"
    ],
    "clip_by_norm": [r"t \cdot \min\left(1, \frac{c}{\Vert t \Vert_2}\right)"],
    "clip_by_global_norm": [
        r"t_i \cdot \min\left(1, \frac{c}{G}\right), \qquad G = \sqrt{\sum_i \Vert t_i \Vert_2^2}",
    ],
    "global_norm": [r"\sqrt{\sum_i \Vert t_i \Vert_2^2}"],
}

_DECAY = "λ is `weight_decay`"
_STEPS = "N is the step, lr₀ is `learning_rate`, d is `decay_rate` and T is `decay_steps`"
WHERE = {
    **dict.fromkeys(("adamw", "lion", "lamb", "novograd"), _DECAY),
    "ademamix": f"{_DECAY}; the averages are those of `beta1`, `beta3` and, for v, `beta2`",
    **dict.fromkeys(("exponential_decay", "natural_exp_decay", "inverse_time_decay"), _STEPS),
    "cosine_decay": "N is the step, lr₀ is `learning_rate`, T is `decay_steps` and α is `alpha`",
    "inverse_sqrt_decay": "N is the step, the highest rate is `peak` and w is `warmup_steps`",
    "clip_by_norm": "t is a leaf and c is `clip_norm`",
    "clip_by_global_norm": "i runs over the leaves t, c is `clip_norm`",
    "global_norm": "i runs over the leaves t",
}
"""What symbols mean that are not in the docstring."""


def shown(name: str) -> str:
    """Markdown of the equations of a name; empty if it has none."""
    equations = "".join(f"\n\n$$\n{tex}\n$$" for tex in FORMULAS.get(name, ()))
    return equations + (f"\n\nHere {WHERE[name]}." if name in WHERE else "")
