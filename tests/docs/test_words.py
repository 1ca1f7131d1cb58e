"""Pages, the package and the tests use the field's terms: none of the phrases below occurs in them."""

import ast
import inspect
import pathlib
import re
from collections.abc import Iterable, Mapping

from source_files import ROOT, name_of, nodes_of, text_of

import jstep

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
MODULES = [path for name in ("jstep", "examples", "docs") for path in sorted((ROOT / name).rglob("*.py"))]
MODULES.append(ROOT / "jstep" / "__init__.pyi")
TESTS = [path for path in sorted((ROOT / "tests").rglob("*")) if path.suffix in (".py", ".sh")]

# Phrase → what to write. Case matters only for `none` (not the value None) and `Besides` (the start of a sentence).
BANNED = {
    r"\b(goes|gone|going|go|went) on\b(?! after \S+ s\b)": "resumes, continues",  # not the line of a stall that is over
    r"\b(makes?|made|making) (a|no|one|the|its|some|\d+) (further |next |single |more )?steps?\b": "run or take a step",
    r"\bsteps? (is|are|was|were|have been|has been) made\b": "steps are run",
    r"(?<!there )\b(is|are|was|were|be|being) no "
    r"(?!(longer|more|less|later|earlier|larger|smaller|worse|better|such|greater|fewer|need)\b)": "is not a …",
    r"(?<!there )\b(is|are|was|be) none\b": "is not one",
    r"\bunless told\b": "by default",
    r"\bbeg(in|an|un|ins|inning) anew\b": "start from scratch",
    r"\bBesides\b": "Additionally",
    r"\bendure[sd]?\b": "tolerate",
    r"\bone's own\b": "custom, user-defined",
    r"\bwhere (it|they) (lies?|lay)\b|\bhow (it|they) (is|are) laid\b": "placement, sharding",
    r"\b(uses?|used|using) (it|the state|its state|a state) up\b|\bstate is used up\b": "donate",
    r"\bdamaged?\b": "corrupted",
    r"\bforged\b": "malicious",
    r"\bgone through\b": "split into microbatches",
    r"\bless pains\b": "a lower optimization level",
    r"\bis the truth\b": "source of truth",
    r"\bevery bit\b": "bitwise",
    r"\bhunts? for\b": "debugging",
    r"\bsteering\b": "callbacks, early stopping",
    r"\btold\b": "configured, given",
    r"\basked\b": "requested, queried",
    r"\banswer(s|ed|ing)\b": "returns, reports",
    r"\bwhole or not (there|at all)\b": "atomic",
    r"\bpassed over\b": "skipped",
    r"\bwhat (becomes|comes) of\b": "say what it is",
    r"\bwhat there is\b": "say what it is",
    r"\bstoreys?\b": "packages, layers",
    r"\bnobody\b": "name the part of the program",
}


BANNED_IN_NAMES_OF_PAGES = re.compile(r"seeing|hunt|(^|-)own-")


def pattern_of(phrase: str) -> re.Pattern[str]:
    return re.compile(phrase, 0 if "none" in phrase or "Besides" in phrase else re.IGNORECASE)


PATTERNS = {pattern_of(phrase): instead for phrase, instead in BANNED.items()}


def found_in(text: str) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "`…`", text)  # code is not checked
    return [
        f"{match[0]!r} (write: {instead})" for pattern, instead in PATTERNS.items() for match in pattern.finditer(prose)
    ]


# Strings and comments of Python source. The module tokenize takes ten times as long.
LEXEMES = re.compile(
    r"""(?P<string>\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)


def strings_and_comments(source: str) -> list[str]:
    return [match[0] for match in LEXEMES.finditer(source)]


def comments_of(source: str) -> list[str]:
    return [match["comment"] for match in LEXEMES.finditer(source) if match["comment"]]


def offenders(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of the texts in which phrases are found, with these phrases."""
    found = {name: found_in(text) for name, text in texts.items()}
    return {name: phrases for name, phrases in found.items() if phrases}


def test_pages() -> None:
    assert not offenders({name_of(page): text_of(page) for page in PAGES})


def test_names_of_pages() -> None:
    assert not [page.name for page in PAGES if BANNED_IN_NAMES_OF_PAGES.search(page.name)]
    assert all(map(BANNED_IN_NAMES_OF_PAGES.search, ["seeing.md", "nan-hunt.md", "own-optimizer.md"]))
    assert not BANNED_IN_NAMES_OF_PAGES.search("breakdown-table.md")


def test_strings_and_comments() -> None:
    prose = {name_of(module): "\n".join(strings_and_comments(text_of(module))) for module in MODULES}
    assert not offenders(prose)


def docstrings_and_comments(source: str, nodes: Iterable[ast.AST]) -> list[str]:
    """Return the comments of Python source and the strings that are statements, without other strings (data)."""
    expressions = [node.value for node in nodes if isinstance(node, ast.Expr)]
    strings = [one.value for one in expressions if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return comments_of(source) + strings


def prose_of(test: pathlib.Path) -> str:
    """Return the docstrings and comments of a file of tests, unwrapped; for a shell script, its comments."""
    if test.suffix == ".sh":
        texts = re.findall(r"(?:^|\s)#[^!\n].*", text_of(test))
    else:
        texts = docstrings_and_comments(text_of(test), nodes_of(test))
    return "\n".join(" ".join(text.split()) for text in texts)


def names_in(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names of test functions and test classes."""
    definitions = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return [node.name for node in definitions if node.name.lower().startswith("test")]


def in_words(name: str) -> str:
    """Return a name in snake_case as words; in names, `none` is the value."""
    return " ".join("None" if word == "none" else word for word in name.split("_"))


def test_docstrings_and_comments_of_tests() -> None:
    assert not offenders({name_of(test): prose_of(test) for test in TESTS})


def test_names_of_tests() -> None:
    modules = [test for test in TESTS if test.suffix == ".py"]
    names = [(module, name) for module in modules for name in (module.stem, *names_in(nodes_of(module)))]
    assert not offenders({f"{name_of(module)}: {name}": in_words(name) for module, name in names})


def test_data_in_tests_is_not_checked() -> None:
    source = '"""A run goes on."""\nx = "x is no number"  # damaged\n"""It is told."""\ndef test_it_is_told(): pass\n'
    nodes = list(ast.walk(ast.parse(source)))
    assert sorted(docstrings_and_comments(source, nodes)) == ["# damaged", "A run goes on.", "It is told."]
    assert [in_words(name) for name in names_in(nodes)] == ["test it is told"]


def test_banned_phrases_are_found() -> None:
    dialect = "The run goes on. x is no number. The run makes a step. Besides, it is damaged. The step must be none."
    assert len(found_in(dialect)) == 6
    assert not found_in("There is no file, and x is no longer None. `told` is a name.")


# Each is a verb unless "of" follows: "Counts of steps" is a noun phrase.
THIRD_PERSON = """
    Accumulates Adds Appends Assigns Attaches Begins Calls Checks Closes Compiles Completes Continues Copies Counts
    Creates Deletes Delivers Describes Detects Does Draws Ends Evaluates Feeds Gives Hashes Holds Interrupts Iterates
    Keeps Logs Makes Measures Merges Opens Passes Raises Reads Receives Records Refuses Registers Releases Repeats
    Requests Resets Restarts Restores Returns Runs Saves Sets Shows Starts Stops Switches Takes Times Traces Trains
    Updates Uses Waits Warns Writes Yields
""".split()  # noqa: SIM905
VAGUE = re.compile(r"(What|Where|How|Whose) (?!.*\?)")
INDICATIVE = re.compile(rf"({'|'.join(THIRD_PERSON)})\b(?! of\b)")


def first_lines(module: pathlib.Path, pattern: re.Pattern[str]) -> list[str]:
    """Return the first lines of docstrings that begin with the pattern."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) for node in nodes_of(module) if isinstance(node, documented)]
    return [doc.split("\n")[0] for doc in docs if doc and pattern.match(doc)]


def test_docstrings_begin_with_no_relative_clause() -> None:
    found = {name_of(module): first_lines(module, VAGUE) for module in MODULES if module.suffix == ".py"}
    assert not {module: lines for module, lines in found.items() if lines}


def test_docstrings_begin_with_no_verb_in_the_third_person() -> None:
    """Functions begin with an imperative ("Return …"), classes with a noun phrase ("A hook that …")."""
    modules = [module for module in MODULES if module.suffix == ".py" and module.is_relative_to(ROOT / "jstep")]
    found = {name_of(module): first_lines(module, INDICATIVE) for module in modules}
    assert not {module: lines for module, lines in found.items() if lines}


def test_nouns_are_not_verbs() -> None:
    assert INDICATIVE.match("Counts seconds from now.")
    assert not any(map(INDICATIVE.match, ("Counts of steps.", "Weights of z.", "Slots by name.", "Batches by step.")))


def test_slots_are_defined_where_they_first_appear() -> None:
    for page in ("README.md", "docs/index.md", "docs/tutorial/state-and-step.md"):
        text = re.sub(r"```.*?```", "", text_of(ROOT / page), flags=re.DOTALL)
        sentences = re.split(r"(?<=[.:])\s", text)
        first = next(one for one in sentences if "slots" in re.sub(r"`[^`\n]*slots[^`\n]*`", "", one))
        assert "optimizer state" in " ".join(first.split()), page


def test_train_state_defines_slots() -> None:
    first = inspect.getdoc(jstep.TrainState).split("\n\n")[:2]
    assert "optimizer state" in " ".join(first)
    assert "slots" in " ".join(first)


def test_signatures_of_optimizers_and_schedules_name_their_types() -> None:
    """The files begin with `from __future__ import annotations`, so that `help()` does not expand the type aliases."""
    functions = [getattr(jstep, name) for name in jstep.__all__ if inspect.isfunction(getattr(jstep, name))]
    files = {function: inspect.getsourcefile(inspect.unwrap(function)) or "" for function in functions}
    taken = [one for one, file in files.items() if {"optimizers", "schedules"} & set(pathlib.Path(file).parts)]
    assert jstep.adamw in taken
    assert not [one.__name__ for one in taken if "numpy.number" in str(inspect.signature(one))]
