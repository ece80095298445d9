"""The pages: their Python runs as printed, their links, files and pictures exist, they are short, and their tables are up to date."""

from __future__ import annotations

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
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
DRAWN = ("figures", "generated")  # folders of docs/ that make docs fills
MOST_WORDS = {"docs/kernels/hopper.md": 800, "docs/kernels/live_keys.md": 800}
MOST_WORDS_OF_A_PAGE = 1000


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
    """Words a reader reads: table rules, comments and the targets of links do not count."""
    text = re.sub(r"<!--.*?-->|\]\([^)]*\)|\|[-:| ]+\|", " ", page.read_text(), flags=re.DOTALL)
    return len(re.findall(r"\w[\w'.,:/-]*", text))


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=name_of)
def test_pages_are_short(page):
    most = MOST_WORDS.get(name_of(page), MOST_WORDS_OF_A_PAGE)
    assert words(page) <= most, f"{name_of(page)}: {words(page)} words, expected at most {most}"


def test_the_readme_has_at_most_1000_words_without_its_tables():
    text = re.sub(r"<!-- bench:([\w-]+) -->.*?<!-- /bench:\1 -->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len([word for line in text.splitlines() if not line.startswith("|") for word in line.split()]) <= 1000


def links(page: Path) -> list[Path]:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    return [(page.parent / target).resolve() for target in targets if not target.startswith("http")]


def is_drawn(path: Path) -> bool:
    return path.parent.parent == DOCS and path.parent.name in DRAWN


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=name_of)
def test_links_lead_somewhere(page):
    assert not [path for path in links(page) if not path.is_file() and not is_drawn(path)]


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


def test_the_gallery_has_every_constructor():
    from dmattn import BlockMask, IndexMask, IntervalMask

    text = (DOCS / "gallery.md").read_text()
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


def test_learning_curves_have_one_run_a_seed_and_end_where_the_runs_end(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import draw

    runs = draw.runs_of("dense", lambda s: s["task"] == "text" and s["seconds"] > 0)
    seeds = [run["settings"]["seed"] for run in runs]
    assert len(seeds) == len(set(seeds)) > 1
    for run in runs:
        first, last = run["curve"][0], run["curve"][-1]
        assert [draw.bits_at(run, "step", point["step"]) for point in (first, last)] == [first["held_bits"], last["held_bits"]]
        (a, b), middle = run["curve"][:2], draw.bits_at(run, "step", (first["step"] + run["curve"][1]["step"]) / 2)
        assert min(a["held_bits"], b["held_bits"]) < middle < max(a["held_bits"], b["held_bits"])


def test_tables_are_what_the_results_say():
    from dmattn_bench import report

    assert report.pages(ROOT, check=True) == []
