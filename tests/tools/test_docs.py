"""The pages: their Python runs as printed, their links, files and pictures exist, they are short, and their tables are up to date."""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAB = sorted((ROOT / "research/lab").glob("*.md"))  # as long as it likes, and of code that has changed since
DRAWN = ("figures", "generated")  # folders of docs/ that make docs fills
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name not in DRAWN)]
COUNTED = [page for page in PAGES if page.name not in ("README.md", "api.md", "errors.md")]  # the last two are generated
MOST_WORDS_OF_A_PAGE = 900
MOST_WORDS_OF_ALL = 12_000  # without code and tables of results


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_python() -> list[Path]:
    return [page for page in PAGES if "```python\n" in page.read_text()]


@pytest.mark.parametrize("page", with_python(), ids=name_of)
def test_python_runs_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some blocks write files
    if importlib.util.find_spec("matplotlib"):
        monkeypatch.setenv("MPLBACKEND", "Agg")
    torch.manual_seed(0)
    text = page.read_text()
    if "plot(" in text:
        pytest.importorskip("matplotlib")
    if "<!-- needs transformers -->" in text:
        pytest.importorskip("transformers")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, name_of(page), "exec"), names)
    out = names.get("out")
    assert out is None or (isinstance(out, torch.Tensor) and bool(out.isfinite().all()))


def words(page: Path) -> int:
    """Words a reader reads: code, tables of results, table rules, comments and the targets of links do not count."""
    text = re.sub(r"<!-- bench:([\w-]+) -->.*?<!-- /bench:\1 -->|```.*?```", " ", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|\]\([^)]*\)|\|[-:| ]+\|", " ", text, flags=re.DOTALL)
    return len(re.findall(r"\w[\w'.,:/-]*", text))


@pytest.mark.parametrize("page", [ROOT / "README.md", *COUNTED], ids=name_of)
def test_pages_are_short(page):
    assert words(page) <= MOST_WORDS_OF_A_PAGE


def test_all_pages_together_are_short():
    assert sum(map(words, COUNTED)) <= MOST_WORDS_OF_ALL


def links(page: Path) -> list[Path]:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    return [(page.parent / target).resolve() for target in targets if not target.startswith("http")]


def is_drawn(path: Path) -> bool:
    return path.parent.parent == DOCS and path.parent.name in DRAWN


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=name_of)
def test_links_lead_somewhere(page):
    assert not [path for path in links(page) if not path.is_file() and not is_drawn(path)]


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_links_to_headings_and_moved_pages_lead_somewhere():
    targets = [(page.parent, *link) for page in PAGES for link in re.findall(r"\]\(([^)#\s:]+)#([^)\s]+)\)", page.read_text())]
    moved = re.findall(r'"\w+": "(\w+)\.html#([\w-]+)"', (DOCS / "conf.py").read_text())
    assert len(targets) > 15
    assert moved
    wrong = [
        link
        for link in [*targets, *((DOCS, f"{name}.md", at) for name, at in moved)]
        if link[2] not in anchors(link[0] / link[1])
    ]
    assert not wrong


def test_pages_show_what_is_drawn_and_the_readme_what_is_committed(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS))
    import draw
    import pictures

    draw.draw_all(tmp_path / "figures")
    pictures.draw_all(tmp_path / "generated")
    drawn = {DOCS / path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg")}
    for path in tmp_path.rglob("*.svg"):
        assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg"), path
    shown = {page: {path for path in links(page) if is_drawn(path)} for page in PAGES}
    assert set().union(*shown.values()) <= drawn
    listed = subprocess.run(["git", "ls-files", *DRAWN], cwd=DOCS, capture_output=True, text=True)
    if listed.returncode == 0:
        assert {DOCS / name for name in listed.stdout.split()} == shown[ROOT / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_functions_exist(page):
    """`file:function`: the file defines it."""
    for name, function in re.findall(r"`((?:cpp|python)/[\w./]+):(\w+)`", page.read_text()):
        source = (ROOT / name).read_text()
        assert re.search(rf"^(?!.*\breturn\b)[^\n/=]*[\w>&*] {function}\(", source, re.MULTILINE), f"{name} defines no {function}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page):
    for name in re.findall(r"`((?:cpp|python|docs|examples|benchmarks|research|tests|tools|cmake)/[\w./]*)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_every_page_is_in_the_contents():
    listed = set()
    for page in PAGES:
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert {page for page in PAGES if page.parent != ROOT} - {DOCS / "index.md"} == listed


def test_the_page_on_masks_has_every_constructor():
    from dmattn import BlockMask, IndexMask, IntervalMask

    text = (DOCS / "masks.md").read_text()
    for cls in (IntervalMask, BlockMask, IndexMask):
        own = [name for name, value in vars(cls).items() if isinstance(value, classmethod) and not name.startswith("_")]
        assert own
        for name in own:
            assert f"{cls.__name__}.{name}(" in text, f"{cls.__name__}.{name}"


def test_the_reference_has_every_public_name():
    import dmattn

    text = (DOCS / "api.md").read_text()
    for name in dmattn.__all__:
        value = getattr(dmattn, name)
        if callable(value):
            assert f"dmattn.{name}\n" in text, name


def test_the_page_on_semantics_has_every_op():
    ops = re.findall(r'"(\w+)\(Tensor', (ROOT / "cpp/schema.cpp").read_text())
    text = (DOCS / "semantics.md").read_text().split("## Ops")[1]
    assert len(ops) > 12
    assert not [op for op in ops if f"`{op}`" not in text]


def test_plots_have_one_style(monkeypatch, tmp_path):
    """Legends of at most five words an entry, named axes, ours in our colours alone."""
    pytest.importorskip("matplotlib")
    from dmattn_bench import plots, report, style

    figures = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.update({path.stem: figure}))
    report.draw_committed(ROOT, tmp_path)
    assert {"speed_over_length", "density", "decode_over_context", "models"} <= set(figures)
    for name, figure in figures.items():
        lines = [line for ax in figure.axes for line in ax.get_lines()]
        assert all(ax.get_xlabel() for ax in figure.axes), name
        assert figure.axes[0].get_ylabel(), name
        words = [text.get_text() for ax in figure.axes if ax.get_legend() for text in ax.get_legend().get_texts()]
        assert 0 < max(len(entry.split()) for entry in words) <= 5, name
        for line in lines:
            label = line.get_label()
            if label.startswith("dmattn"):
                assert line.get_color() in (style.OURS, style.OURS_TOO), (name, label)
            elif label in style.MODELS:
                assert line.get_color() == style.MODELS[label]
        plots.pyplot().close(figure)


def test_lengths_are_short():
    from dmattn_bench import style

    assert [style.short(count) for count in (512, 4096, 131072, 2**20)] == ["512", "4k", "128k", "1M"]


def test_tables_are_what_the_results_say():
    from dmattn_bench import report

    assert report.pages(ROOT, check=True) == []


# Numbers -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_numbers_have_a_source(page):
    from dmattn_bench import cited

    assert not cited.unsourced(page.read_text())


def test_numbers_without_a_source_are_found():
    from dmattn_bench.cited import unsourced

    assert unsourced("It is 1.7x faster, 12 ms, 57 MB, 9 % of 128 x 128, `3x`, 2^20 tokens, 5 seeds.") == [
        "1.7x",
        "12 ms",
        "57 MB",
        "9 %",
    ]
    for found in (
        "9%", "12 %", "7 percent", "2 to 3 times", "1.5-2x", "1.7 \u00d7 ", "1.7x", "5 and 10%", "a minute", "few minutes", "5 or 6 hours",
        "45 seconds", "3-fold", "tenfold", "ten times", "two to three times", "twice", "half as", "449\nMB", "512 MiB", "30 tokens/s",
    ):  # fmt: skip
        assert unsourced(f"The 4 x 4,096 tokens of sm80 take {found} on 2 GPUs, a second pass.") == [found.strip()]
    assert not unsourced("It took <!-- n: a.json ms | ms -->3 ms<!-- /n -->.\n<!-- bench:a -->\n| 2x |\n<!-- /bench:a -->")


# Errors --------------------------------------------------------------------------------------------------------------------------------


def listed_errors(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import errors_of

    return errors_of.all_errors(), errors_of


def test_the_list_of_errors_is_whole(monkeypatch):
    """Every line of the sources that raises with a message, counted without parsing, and every check of the ops."""
    errors, errors_of = listed_errors(monkeypatch)
    found = {(error.file, error.line) for error in errors}
    sources = {path: path.read_text().splitlines() for path in sorted(errors_of.PACKAGE.rglob("*.py"))}
    raising = {
        (path.relative_to(errors_of.PACKAGE).as_posix(), number)
        for path, lines in sources.items()
        for number, line in enumerate(lines, 1)
        if re.match(r"\s+raise [\w.]+\((?!\))", line)
    }
    assert len(raising) > 400
    assert raising == {(file, line) for file, line in found if not file.startswith("cpp/")}
    checks = sum(
        len(re.findall(r"^(?!\s*//).*(?<![\w:.])(?:fail|check)\(", path.read_text(), re.M))
        for path in (ROOT / "cpp").rglob("*.h")
    )
    assert sum(file.startswith("cpp/") for file, _ in found) >= checks - 4  # cpp/errors.h defines both


# What a call gave: shapes and tuples, numbers, sizes and quoted words, devices and dtypes; "0 <=" and layouts such as [B|1, S] are words.
GIVEN = re.compile(r"\[[\d\]-][^\]]*\]?|\w+=\d+|(?<![|\w])(?!0 <)\w*\d[\w.+-]*|'\w+'|(?<=device )\w+|(?<=dtype )\w+|[<=]=?")


def searches_of(message):
    """What a reader searches for: the two longest runs of words before what the call gave."""
    runs = [run.strip(" ,(") for part in message.split(", got")[0].split(": ") for run in GIVEN.split(part)]
    return sorted(runs, key=len, reverse=True)[:2]


def test_messages_are_found_by_their_words(monkeypatch):
    """Every call of tests/ops/test_errors.py is made; its words lead to few entries, one of which fits the whole message."""
    from test_errors import PUBLIC

    errors, errors_of = listed_errors(monkeypatch)
    assert not [error.message for error in errors if "{" in error.message]
    groups = errors_of.grouped(errors)
    entries = [entry for group in groups.values() for entry in group]
    shown = [html.unescape(re.sub(r"<[^>]+>", "", errors_of.entry(entry).replace("<br>", "\n"))) for entry in entries]
    page = errors_of.page(errors)
    assert page.count("<li>") == len(entries) > 500
    assert {id(error) for entry in entries for error in entry} == set(map(id, errors))
    assert re.findall("^#### (.*)", page, re.M) == sorted(
        groups.keys() - {"any argument", "none", "called directly"}, key=str.lower
    )
    lost, searches = [], set()
    for call, kind, _ in PUBLIC.values():
        with pytest.raises(kind) as raised:
            call()
        message, hits = str(raised.value), []
        for words in searches_of(message):
            found = [entry for entry, text in zip(entries, shown, strict=True) if words in text]
            own = [error for entry in found for error in entry if error.kind == kind.__name__]
            fits = any(re.fullmatch(error.pattern(), message, re.DOTALL) for error in own)
            hits += [words] if fits and len(found) <= 64 else []
        searches.update(hits[:1])
        lost += [] if hits else [message]
    assert not lost
    assert len(searches) > 100
