"""Check that text reads as plain English: ``python lint/language.py`` (part of ``make lint``).

It counts docstrings with a first word that cannot begin an imperative or a noun phrase, comments
that turn the formatter off, and the words of each sentence in the documents. Each count has a
ceiling below, which may only fall. ``--list`` prints every place.
"""

from __future__ import annotations

import ast
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
CODE: Final = ("pipeswitch", "workers", "memory_daemon", "benchmarks", "lint", "docs")
FIRST_WORDS: Final = re.compile(
    r"(as|by|for|how|in|into|it|its|nobody|nothing|of|so|somebody|such|that|these|they|this|those|"
    r"to|until|what|whatever|when|where|whether|which|while|who|whoever|whom|whose|why|with|without)\b",
    re.IGNORECASE,
)
MAX_BAD_DOCSTRINGS: Final = 0
MAX_FMT_SKIPS: Final = 0
MAX_MEAN_SENTENCE_WORDS: Final = 18.0

# Names that the product no longer has, and participles: they tell what happened to a value, but not
# what it is.
OLD_NAMES: Final = re.compile(
    r"Account|Announce|Callers|Choosing|Complaints|Fleet|Ground|Judge|Keep|Lane|Machine|Moves|Outbox|"
    r"Peers|PoolView|Readers|Rehearsal|Replica|Retract|Room|Said|Sizes|Standing|SteppedAside|Tally|"
    r"Tiles|accuse|bell|bill|board|edition|first_word|fleet|home_bytes|is_hopeless|kept_groups|lane|"
    r"landings|lineage|look_again|may_overtake|patience_ms|printable|raise_word|readings|rehome|room|"
    r"settle|tally|too_late|asked|called|found|given|held|kept|lost|made|said|seen|taken|told|wanted"
)
PRODUCT: Final = ("pipeswitch", "workers", "memory_daemon")

Place = tuple[Path, int, str]


def bad_docstrings(path: Path) -> Iterator[Place]:
    """Yield each docstring of a file that begins with a forbidden word."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        if FIRST_WORDS.match(text):
            yield path, node.body[0].lineno, text.splitlines()[0]


def old_names(path: Path) -> Iterator[Place]:
    """Yield each name of a file that is forbidden; fields of classes may be keys of the wire."""
    tree = ast.parse(path.read_text("utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = [id(getattr(one, "target", None)) for node in classes for one in node.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) or id(node) in fields:
            continue
        name = getattr(node, "id", getattr(node, "name", getattr(node, "arg", None)))
        if isinstance(name, str) and OLD_NAMES.fullmatch(name):
            yield path, getattr(node, "lineno", 0), name


def fmt_skips(path: Path) -> Iterator[Place]:
    """Yield each line of a file that the formatter may not touch."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if re.search(r"# fmt: (skip|off)", line):
            yield path, number, line.strip()


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a Markdown page: no code, tables, headings or links' targets."""
    text = re.sub(r"(?ms)^```.*?^```|<!--.*?-->|^\|.*?$|^#.*?$|^!\[.*?$|^:::.*?$", "\n\n", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]*`", "code", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        for one in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())):
            if len(one.split()) > 2:
                yield one


def mean_sentence_words() -> tuple[float, list[Place]]:
    """Return the mean number of words of a sentence, and the sentences of 40 words or more."""
    counts, long = [], []
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for one in sentences(path.read_text("utf-8")):
            counts.append(len(one.split()))
            if counts[-1] >= 40:
                long.append((path, 0, one))
    return sum(counts) / len(counts), long


def main() -> int:
    """Print what is over its ceiling, or everything with ``--list``; return the exit status."""
    files = [path for top in CODE for path in sorted((ROOT / top).rglob("*.py"))]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    bad = [place for path in files for place in bad_docstrings(path)]
    skips = [place for path in [*files, *tests] for place in fmt_skips(path)]
    old = [
        place for top in PRODUCT for path in (ROOT / top).rglob("*.py") for place in old_names(path)
    ]
    mean, long = mean_sentence_words()
    failed = False
    for name, places, ceiling in (
        ("docstrings with a forbidden first word", bad, MAX_BAD_DOCSTRINGS),
        ("lines that the formatter may not touch", skips, MAX_FMT_SKIPS),
        ("names of the old dialect", old, 0),
    ):
        over = len(places) > ceiling
        failed |= over
        sys.stdout.write(f"{len(places)} {name} (at most {ceiling})\n")
        if over or "--list" in sys.argv:
            for path, number, line in places:
                sys.stdout.write(f"  {path.relative_to(ROOT)}:{number}: {line}\n")
    sys.stdout.write(
        f"{mean:.1f} words in a sentence of the documents (at most {MAX_MEAN_SENTENCE_WORDS})\n"
    )
    if mean > MAX_MEAN_SENTENCE_WORDS or "--list" in sys.argv:
        for path, _, line in long:
            sys.stdout.write(f"  {path.relative_to(ROOT)}: {line}\n")
    return int(failed or mean > MAX_MEAN_SENTENCE_WORDS)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ``--list | head`` ends it without a traceback
    sys.exit(main())
