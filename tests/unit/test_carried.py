"""Which plain variables a loop carries along: read before they are written, in its own source."""

from __future__ import annotations

import textwrap

import pytest

from workers.training.carried import carried_names

HEAD = "for x, y in job.steps(loader, model=model, optimizer=optimizer):\n"


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        ("total += loss", ["total"]),
        ("if loss < best: best = loss", ["best"]),
        ("best = min(best, loss)", ["best"]),
        ("seen, total = seen + 1, total + loss", ["seen", "total"]),
        ("while patience: patience -= 1", ["patience"]),
        ("print(last)\nlast: float = loss", ["last"]),
        ("print(best)\nfor best in range(3): pass", ["best"]),
        ("if (loss < best) or (best := loss): pass", ["best"]),
        ("rows = [best for row in rows]\nbest = loss", ["rows", "best"]),
        # computed anew in each pass
        ("value = loss.item()\nprint(value)", []),
        ("count = 0\ncount += 1", []),
        ("for count in range(3): print(count)", []),
        ("print(x)\nx = x + 1", []),  # the loop's own
        ("kept['best'] = min(kept['best'], loss)", []),
        ("best = kept['best']\nbest = min(best, loss)\nkept['best'] = best", []),
        # read alone, or another scope's
        ("loss = rate * f(x)", []),
        ("rows = [v for v in x]\nv = 1", []),
        ("def f(): return best\nbest = 1", []),
        # a clock
        ("print(time.time() - began)\nbegan = time.time()", []),
    ],
)
def test_the_names_that_a_body_carries(body: str, carried: list[str]) -> None:
    assert carried_names(HEAD + textwrap.indent(body, "    "), 1, "steps") == carried


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("for x in loader: total += x", 1),  # not of job
        (HEAD + "    total += x", 2),  # not the line of the loop
        ("this is no Python", 1),
        ("", 1),
    ],
)
def test_what_is_no_loop_of_a_job_is_not_looked_at(source: str, line: int) -> None:
    assert carried_names(source, line, "steps") is None


def test_a_head_over_several_lines_and_wrapped_is_found() -> None:
    source = (
        "for n, x in enumerate(tqdm(job.steps(\n    loader,\n    model=m,\n))):\n    total += n"
    )
    assert [carried_names(source, line, "steps") for line in (1, 3, 5)] == [
        ["total"],
        ["total"],
        None,
    ]
