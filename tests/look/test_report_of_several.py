"""The page of several runs: its order, table, metric, options, groups by seed, colors, and text of
others."""

import html
import itertools
import math
import re

import html5lib
import numpy as np
import pytest
from written_runs import write_checkpoint, write_run, write_start
from written_sweep import losses, write_run_of_sweep, write_sweep

import jstep
from jstep.look.cli import main
from jstep.showing.drawing import NEUTRAL, thin


def parsed(page):
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)


def text(cell):
    return "".join(cell.itertext()).strip()


def table(page):
    """The heads, and the rows as lists of text, with the blanks of the tree in front of names."""
    (found,) = parsed(page).findall(".//table[@id='runs']")
    return [text(cell) for cell in found.iter("th")], [
        [text(cell) for cell in row] for row in found.find("tbody")
    ]


def seeds(page):
    """The rows of the table of runs that differ by a seed."""
    rows = [[text(cell) for cell in row] for row in parsed(page).iter("tr")]
    return [row for row in rows if " seeds: " in row[0]]


def column(page, name):
    heads, rows = table(page)
    return {row[0]: row[heads.index(name)] for row in rows}


def figure(page, title):
    return next(
        part
        for part in re.findall("<figure.*?</figure>", page)
        if f"<figcaption>{title}</figcaption>" in part
    )


def write_six(above, configs, least=lambda i: 1.0 + i, **fields):
    for i, config in enumerate(configs):
        scalars = {"loss": losses(least(i))}
        write_run_of_sweep(above / f"r{i}", config, scalars, run=f"{i:08x}", **fields)


RATES = [{"lr": rate} for rate in (0.1, 0.01, 0.001, 0.0002, 0.3, 0.05)]


@pytest.mark.parametrize("count", [2, 14])
def test_the_order_of_the_page(count, tmp_path):
    """It is one design for any number of runs."""
    write_sweep(tmp_path, count)
    page = jstep.report(tmp_path).html
    heads = [text(head) for head in parsed(page).iter("h2")]
    assert heads[-4:] == ["The runs", "How it went", "What differs", "Where the time went"]
    assert heads[:-4] == ["Warnings"] * (count > 2)
    assert page.index('id="runs"') < page.index('class="pictures"')


def test_where_nothing_is_odd_the_table_is_first(tmp_path):
    write_six(tmp_path, RATES)
    assert text(next(parsed(jstep.report(tmp_path).html).iter("h2"))) == "The runs"


def test_a_row_has_its_numbers_and_the_options_that_vary(tmp_path):
    """What was chosen stands left of what was measured; numbers have four digits, and all in the
    tooltip."""
    write_six(tmp_path, [config | {"same": 1} for config in RATES], values={"loss": 2.54321})
    page = jstep.report(tmp_path).html
    heads, rows = table(page)
    assert heads == [
        "name", "status", "step", "best loss", "at step", "last loss", "lr", "wall time", "goodput",
    ]  # fmt: skip
    assert rows[0] == ["r0", "finished", "300/300", "1.032", "290", "2.543", "0.1", "10 s", "90.0%"]
    assert '<td class="n" data-v="2.54321" title="2.54321">2.543</td>' in page
    assert [row[6] for row in rows] == ["0.1", "0.01", "0.001", "0.0002", "0.3", "0.05"]
    assert "same" not in page.partition("What differs")[2]


def test_the_tree_is_padding(tmp_path):
    parent = {"path": f"{tmp_path}/r0/model-10", "step": 10}
    write_six(tmp_path, RATES[:5])
    write_run_of_sweep(
        tmp_path / "s", {"lr": 9.0}, {"loss": losses(1)}, parent=parent, parent_run="00000000"
    )
    cells = [
        row.find("td")
        for row in parsed(jstep.report(tmp_path).html).find(".//table[@id='runs']/tbody")
    ]
    assert [text(cell) for cell in cells[:3]] == ["r0", "s @10", "r1"]
    assert [cell.get("style") for cell in cells[:3]] == [None, "padding-left:1.1em", None]
    branch = re.search(
        r"<td[^>]*white-space: pre[^>]*>└─ s @10</td>", jstep.runs(tmp_path)._repr_html_()
    )
    assert branch, "blanks of a tree do not collapse in a notebook"


@pytest.mark.parametrize(
    ("kept", "name", "mode", "words"),
    [
        ({}, None, None, "least validation/acc"),
        ({}, None, "max", "greatest validation/acc"),
        ({}, "loss", None, "least loss"),
        ({"other": "max"}, None, None, "greatest other"),
        ({"other": "min"}, None, "max", "least other"),
        ({"other": None}, None, "max", "greatest other"),
    ],
)
def test_the_metric_and_its_direction(kept, name, mode, words, tmp_path):
    best = {metric: [0.5, 10, write_checkpoint(tmp_path / "best")] for metric in kept}
    own = {metric: {"mode": direction, "data": None} for metric, direction in kept.items()}
    values = {"loss": 1.0, "validation/acc": 0.5, "other": 0.5}
    for i in range(6):
        write_run_of_sweep(
            tmp_path / f"r{i}", {"lr": i}, {"loss": losses(i)}, best=best, kept=own, values=values
        )
    page = jstep.report(tmp_path, metric=name, mode=mode).html
    assert f"The best is the {words}." in page


def test_without_evaluation_the_loss_ranks(tmp_path):
    write_six(tmp_path, RATES, lambda i: 9.0 - i)
    assert column(jstep.report(tmp_path).html, "best loss")["r5"] == "4.032"


def test_runs_without_the_metric_and_with_nan_come_last(tmp_path):
    write_six(tmp_path, RATES)
    write_run_of_sweep(
        tmp_path / "nan", {"lr": 1}, {"loss": [math.nan] * 9}, values={"loss": "nan"}
    )
    write_run_of_sweep(tmp_path / "other", {"lr": 2}, {"other": [1.0] * 9})
    write_run(tmp_path / "nothing", values={})
    write_start(tmp_path / "broken", b"{}")
    page = jstep.report(tmp_path, metric="loss").html
    best = column(page, "best loss")
    assert [best[name] for name in ("nan", "other", "nothing", "broken")] == [""] * 4
    assert re.findall(r"</svg> (r\d|nan|other|nothing|broken)", page)[:6] == [
        f"r{i}" for i in range(6)
    ]
    assert "loss is not finite at 9 of 9 points" in page


def test_a_group_differs_in_nothing_but_a_seed(tmp_path):
    configs = [{"lr": 0.1, "dataSeed": seed} for seed in (0, 1)] + [{"lr": 0.1}]
    configs += [{"lr": 0.2, "seed": 0}, {"lr": 0.3, "seeded": 1}, {"lr": 0.3, "seeded": 2}]
    write_six(tmp_path, configs)
    page = jstep.report(tmp_path).html
    assert [row[0] for row in table(page)[1]] == ["r0", "r1", "r2", "r3", "r4", "r5"]
    assert seeds(page) == [["3 seeds: r0, r1, r2", "300", "2.032", "1.032", "3.032"]], (
        "a seed may be missing"
    )


def test_a_mean_says_of_how_many_runs_it_is_and_where_they_ended(tmp_path):
    write_six(tmp_path, [{"seed": seed} for seed in range(6)])
    write_run_of_sweep(tmp_path / "r6", {"seed": 6}, {"loss": losses(1.0)}, step=[0, 268], end=None)
    write_run_of_sweep(tmp_path / "r7", {"seed": 7}, {"loss": [math.nan] * 30})
    ((name, steps, *_),) = seeds(jstep.report(tmp_path).html)
    assert name.startswith("7 of 8 seeds: r0, r1, r2, r3, r4, ")
    assert steps == "268 to 300"


def test_equal_runs_and_runs_of_other_parents_are_no_group(tmp_path):
    write_six(tmp_path, [{"seed": 1}] * 6)
    assert seeds(jstep.report(tmp_path).html) == []
    for i in (0, 1):
        parent = {"path": f"{tmp_path}/r{i}/model-10", "step": 10}
        write_run_of_sweep(tmp_path / f"s{i}", {"seed": 5 + i}, {"loss": losses(1)}, parent=parent)
    assert seeds(jstep.report(tmp_path).html) == []


def test_ten_runs_differ_in_color_and_dash_and_keep_them(tmp_path):
    write_sweep(tmp_path, 20)
    page = jstep.report(tmp_path).html
    legend = re.search('<p id="legend">(.*?)</p>', page)[1]
    keys = re.findall(
        r'class="key"(?: data-i="(\d+)")?><svg[^>]*><path class="(s\d+) (d\d)"',
        legend,
    )
    assert len({color for _, color, _ in keys[:10]}) == 10
    assert keys[10:] == [("", f"s{NEUTRAL}", "d0")]
    assert all(one[2] != other[2] for one, other in itertools.pairwise(keys[:10])), (
        "neighbours by dashes"
    )
    assert page.count('id="legend"') == 1
    of = {run: color for run, color, _ in keys[:10]}
    for part in re.findall("<figure.*?</figure>", page):
        for color, run in re.findall(
            r'<path class="(?:line|dot|best dot|best) (?:pale )?(s\d+)[^"]*" data-i="(\d+)"', part
        ):
            assert color == of.get(run, f"s{NEUTRAL}")


def test_options_are_those_of_the_config(tmp_path):
    """Hyperparameters are, where no run has one; what derives from the model never is."""
    for kind in ("config", "none"):
        for i, rate in enumerate((0.1, 0.2, 0.3)):
            config = {"a/lr": rate, "a/step": i, "b/lr": rate} if kind == "config" else None
            write_run_of_sweep(
                tmp_path / kind / f"r{i}", config, {"loss": losses(i)}, rate=rate, parameters=i
            )
    assert table(jstep.report(tmp_path / "config").html)[0][-5:-2] == ["a/lr", "a/step", "b/lr"]
    assert table(jstep.report(tmp_path / "none").html)[0][-3:-2] == ["learning_rate"]
    assert (
        "learning_rate" in jstep.report(tmp_path / "config").html.partition("What differs</h2>")[2]
    )


def test_text_of_others_is_escaped_and_cut(tmp_path):
    words = "<script>alert(1)</script>" + "x" * 300
    for i in range(6):
        config = {words: f"{i}{words}", "short": i}
        folder = tmp_path / f"<b>{i}" / ("n" * 200)
        scalars = {"loss": losses(i), "<script>t": [1.0, 2.0]}
        write_run_of_sweep(folder, config, scalars, end=["failed", f"{words}: \x1b[31m"])
    page = jstep.report(tmp_path).html
    parsed(page)
    assert page.count("<script>") == 1
    assert not re.search("<b>\\d", page)
    (row,) = [row for row in re.findall("<tr.*?</tr>", page) if 'data-r="3"' in row]
    cells = re.findall(
        r'<td(?: class="n")?(?: data-v="[^"]*")?(?: title="([^"]*)")?[^>]*>([^<]*)',
        row,
    )
    assert max(len(html.unescape(cut).strip()) for _, cut in cells) <= 40, cells
    assert f"failed: {words}" in html.unescape(cells[1][0])
    assert html.unescape(cells[0][0]) == f"<b>3/{'n' * 200}"


def test_thin_keeps_ends_extremes_and_what_is_not_finite():
    values = np.sin(np.arange(100_000.0))
    values[[12_345, 54_321]] = 9.0, math.nan
    kept = thin(np.arange(100_000), values, 100)
    assert kept.size <= 500
    assert {0, 12_345, 54_321, 99_999} <= set(kept.tolist())
    assert thin(np.arange(5), values[:5], 100).tolist() == [0, 1, 2, 3, 4]


def test_the_options_of_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_six(tmp_path / "runs", RATES)
    assert main(["report", "runs", "--metric", "loss", "--mode", "max", "-o", "-"]) == 0
    assert "The best is the greatest loss" in capsys.readouterr().out
    assert main(["report", "runs", "--metric", "lss"]) == 2
    assert "metric='lss': must be a metric of the runs; there are loss" in capsys.readouterr().err
    for fields in ({"metric": 3}, {"mode": "most"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(fields))):
            jstep.report("runs", **fields)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_table_is_as_wide_as_the_terminal(width, tmp_path, capsys, monkeypatch):
    write_sweep(tmp_path, 12)
    monkeypatch.setenv("COLUMNS", str(width))
    for options in ([], ["--differences"], ["--metrics", "*"]):
        assert main(["runs", str(tmp_path), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert sum(bool(re.match(r"\W*run-\d{3}(?!:)", line)) for line in lines) == 12
    assert max(map(len, str(jstep.runs(tmp_path)).splitlines())) <= width


def test_reasons_are_below_the_table(tmp_path, monkeypatch):
    write_six(tmp_path, RATES, end=["failed", "ValueError: " + "why " * 99], values={"loss": 1.0})
    monkeypatch.setenv("COLUMNS", "100")
    lines = str(jstep.runs(tmp_path)).splitlines()
    assert re.search(r"failed +300/300 +1 +2023-\S+ \S+ +10 s +1×cpu$", lines[1])
    assert max(map(len, lines)) <= 100
    assert [line.partition(":")[0] for line in lines[7:] if line[0] != " "] == [
        f"r{i}" for i in range(6)
    ]
    assert lines[7].startswith("r0: failed: ValueError: why why")


@pytest.mark.thorough
def test_a_thousand_runs_of_forty_scalars(tmp_path):
    write_sweep(tmp_path, 1000, length=100, norms=38)
    page = jstep.report(tmp_path).html
    assert len(page.encode()) < 8e6
    assert len(re.findall('<tr[^>]* data-r="', page)) == 1000
    assert page.count("<figcaption>") > 40


def test_the_best_run_is_named_with_its_options(tmp_path):
    write_six(tmp_path, RATES, least=lambda i: abs(i - 2.0) + 1.0)
    words = re.search(r"<p>(Best: .*?)</p>", jstep.report(tmp_path).html)[1]
    assert re.match(r"Best: \S+, \S+ at step \d+ with lr 0\.001\. The best is the least ", words)
