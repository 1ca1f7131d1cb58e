"""Pages, the package and the tests use the field's terms: none of the phrases below occurs in them."""

import ast
import inspect
import io
import pathlib
import re
import tokenize

import pytest

import jstep

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
MODULES = [path for name in ("jstep", "examples", "docs") for path in sorted((ROOT / name).rglob("*.py"))]
MODULES.append(ROOT / "jstep" / "__init__.pyi")
TESTS = [path for path in sorted((ROOT / "tests").rglob("*")) if path.suffix in (".py", ".sh")]

# Phrase → what to write. Case matters only for `none` (not the value None) and `Besides` (the start of a sentence).
BANNED = {
    r"\b(goes|gone|going|go|went) on\b": "resumes, continues",
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


def strings_and_comments(module: pathlib.Path) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(module.read_text(encoding="utf-8")).readline)
    return [token.string for token in tokens if token.type in (tokenize.STRING, tokenize.COMMENT)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: pathlib.Path) -> None:
    assert not found_in(page.read_text(encoding="utf-8"))


def test_names_of_pages() -> None:
    assert not [page.name for page in PAGES if BANNED_IN_NAMES_OF_PAGES.search(page.name)]
    assert all(map(BANNED_IN_NAMES_OF_PAGES.search, ["seeing.md", "nan-hunt.md", "own-optimizer.md"]))
    assert not BANNED_IN_NAMES_OF_PAGES.search("breakdown-table.md")


def test_strings_and_comments() -> None:
    found = {str(module.relative_to(ROOT)): found_in("\n".join(strings_and_comments(module))) for module in MODULES}
    assert not {module: phrases for module, phrases in found.items() if phrases}


def docstrings_and_comments(source: str) -> list[str]:
    """Return the comments of Python source and the strings that are statements, without other strings (data)."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    expressions = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    return comments + [one.value for one in expressions if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def prose_of(test: pathlib.Path) -> list[str]:
    """Return the docstrings and comments of a file of tests, unwrapped; for a shell script, its comments."""
    source = test.read_text(encoding="utf-8")
    texts = re.findall(r"(?:^|\s)#[^!\n].*", source) if test.suffix == ".sh" else docstrings_and_comments(source)
    return [" ".join(text.split()) for text in texts]


def names_in(source: str) -> list[str]:
    """Return the names of test functions and test classes in Python source."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return [node.name for node in nodes if node.name.lower().startswith("test")]


def in_words(name: str) -> str:
    """Return a name in snake_case as words; in names, `none` is the value."""
    return " ".join("None" if word == "none" else word for word in name.split("_"))


def test_docstrings_and_comments_of_tests() -> None:
    found = {str(test.relative_to(ROOT)): found_in("\n".join(prose_of(test))) for test in TESTS}
    assert not {test: phrases for test, phrases in found.items() if phrases}


def test_names_of_tests() -> None:
    modules = [test for test in TESTS if test.suffix == ".py"]
    found = {
        f"{module.relative_to(ROOT)}: {name}": found_in(in_words(name))
        for module in modules
        for name in [module.stem, *names_in(module.read_text(encoding="utf-8"))]
    }
    assert not {name: phrases for name, phrases in found.items() if phrases}


def test_data_in_tests_is_not_checked() -> None:
    source = '"""A run goes on."""\nx = "x is no number"  # damaged\n"""It is told."""\ndef test_it_is_told(): pass\n'
    assert sorted(docstrings_and_comments(source)) == ["# damaged", "A run goes on.", "It is told."]
    assert [in_words(name) for name in names_in(source)] == ["test it is told"]


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
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [
        ast.get_docstring(n) for n in ast.walk(ast.parse(module.read_text(encoding="utf-8"))) if isinstance(n, nodes)
    ]
    return [doc.split("\n")[0] for doc in docs if doc and pattern.match(doc)]


def test_docstrings_begin_with_no_relative_clause() -> None:
    found = {str(module.relative_to(ROOT)): first_lines(module, VAGUE) for module in MODULES if module.suffix == ".py"}
    assert not {module: lines for module, lines in found.items() if lines}


def test_docstrings_begin_with_no_verb_in_the_third_person() -> None:
    """Functions begin with an imperative ("Return …"), classes with a noun phrase ("A hook that …")."""
    modules = [module for module in MODULES if module.suffix == ".py" and module.is_relative_to(ROOT / "jstep")]
    found = {str(module.relative_to(ROOT)): first_lines(module, INDICATIVE) for module in modules}
    assert not {module: lines for module, lines in found.items() if lines}


def test_nouns_are_not_verbs() -> None:
    assert INDICATIVE.match("Counts seconds from now.")
    assert not any(map(INDICATIVE.match, ("Counts of steps.", "Weights of z.", "Slots by name.", "Batches by step.")))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/tutorial/state-and-step.md"])
def test_slots_are_defined_where_they_first_appear(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    sentence = next(
        one for one in re.split(r"(?<=[.:])\s", text) if "slots" in re.sub(r"`[^`\n]*slots[^`\n]*`", "", one)
    )
    assert "optimizer state" in " ".join(sentence.split())


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
