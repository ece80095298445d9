"""What a release needs beside the code: workflows, templates, the container, the citation, and that they name what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePath

import pytest

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[2]
HIDDEN = ROOT / ".github"
WORKFLOWS = sorted((HIDDEN / "workflows").glob("*.yml"))
TEMPLATES = sorted(path for path in (HIDDEN / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
PROSE = [HIDDEN / "CONTRIBUTING.md", HIDDEN / "SECURITY.md", ROOT / "docs/building.md", ROOT / "docs/hub.md"]


def name_of(path: Path) -> str:
    return path.name


def steps(path: Path) -> list[str]:
    """The commands that a workflow runs."""
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_workflows_have_limits_and_few_rights(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"]
    assert workflow[True]  # "on", which YAML reads as a bool
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert all(("uses" in step) != ("run" in step) for step in job["steps"]), name
        assert "timeout-minutes" in job or name == "publish"
        assert set([job["needs"]] if "needs" in job else []) <= set(workflow["jobs"])


def test_there_is_a_workflow_for_each_purpose():
    assert [path.stem for path in WORKFLOWS] == ["docs", "gpu", "lint", "newest", "regression", "tests", "wheels"]
    assert "workflow_dispatch" in yaml.safe_load((HIDDEN / "workflows/gpu.yml").read_text())[True]


def test_every_make_call_has_a_rule_and_variables():
    calls = [(path.name, command) for path in WORKFLOWS for command in steps(path)]
    calls += [(path.name, line) for path in [*PROSE, ROOT / "Dockerfile"] for line in path.read_text().splitlines()]
    found = 0
    for where, text in calls:
        for call in re.findall(r"(?:^|[`\s])make ((?:[a-z]+ ?)(?:[A-Z_]+=\S+ ?)*)", text):
            rule, *settings = call.split()
            if not settings and f"make {rule}`" not in text and not text.strip().startswith(("make", "RUN", "- run")):
                continue  # prose
            assert re.search(rf"^{rule}:", MAKEFILE, re.M), f"{where}: make {rule}"
            for setting in settings:
                assert re.search(rf"^{setting.split('=')[0]} \?=", MAKEFILE, re.M), f"{where}: {setting}"
            found += 1
    assert found > 15


def test_workflows_and_settings_name_groups_that_exist():
    groups = set(PROJECT["dependency-groups"])
    named = {group for path in WORKFLOWS for command in steps(path) for group in re.findall(r"--group (\w+)", command)}
    build = PROJECT["tool"]["cibuildwheel"]
    named |= set(build["test-groups"]) | set(re.findall(r"--group (\w+)", build["before-build"]))
    named |= set(re.findall(r"\$\(VENV\)/(\w+)\.ready(?=[ :]|$)", MAKEFILE)) - {"pip"}
    assert named <= groups
    assert {"build", "test", "wheel"} <= named


def test_torch_is_the_one_dependency():
    """What a run of dmattn needs beyond it is an extra, and each extra is what a page or an error tells users to install."""
    assert [re.match(r"[\w-]+", need)[0] for need in PROJECT["project"]["dependencies"]] == ["torch"]
    assert PROJECT["project"]["optional-dependencies"]["plan"] == ["nanobind-backend>=1.0"]


def test_nothing_says_to_install_dmattn_from_an_index():
    """No release is published: a wheel or a checkout is what there is to install."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py", "*.yml"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if ROOT / name != Path(__file__)]
    found = [path.name for path in paths if re.search(r"pip install (?:[\w.<>=-]+ +)*['\"]?dmattn\b", path.read_text())]
    assert len(paths) > 100
    assert not found


def test_the_matrix_begins_at_the_oldest_python_and_torch():
    matrix = yaml.safe_load((HIDDEN / "workflows/tests.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]["include"]
    pythons = [row["python"] for row in matrix]
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    assert f"torch>={matrix[0]['torch'].removeprefix('torch==').removesuffix('.*')}" in PROJECT["project"]["dependencies"]
    assert pythons == [f"3.{minor}" for minor in range(10, 15)]


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_issue_templates_ask_for_something(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field["validations"]["required"] for field in fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_a_workflow_fails_where_times_became_slower():
    """On a GPU against the committed result, on a CPU against the base of the change; both by the exit status of ``bench compare``."""
    jobs = yaml.safe_load((HIDDEN / "workflows/regression.yml").read_text())["jobs"]
    assert jobs["gpu"]["runs-on"] == ["self-hosted", "gpu"]
    for job in jobs.values():
        compared = [step for step in job["steps"] if "dmattn_bench compare" in step.get("run", "")]
        assert len(compared) == 1
        assert "continue-on-error" not in compared[0]
        assert "||" not in compared[0]["run"]
        measured = " ".join(step["run"] for step in job["steps"] if "make bench" in step.get("run", ""))
        for path in re.findall(r"build/times\S*(?=/\*/)", compared[0]["run"]):
            assert f"--output {path}" in measured


def test_a_workflow_compiles_against_the_newest_torch():
    text = (HIDDEN / "workflows/newest.yml").read_text()
    assert "schedule" in yaml.safe_load(text)[True]
    assert "tests/ops/test_torch_headers.py" in text
    assert "cmake --build" in text


def test_the_citation_says_what_the_project_is():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= set(cited)
    assert cited["license"] == PROJECT["project"]["license"]
    assert cited["title"].startswith(f"{PROJECT['project']['name']}: ")
    assert "version" not in cited  # python/dmattn/_version.py has it


def test_the_stages_of_the_container_are_there():
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.M)
    assert stages == ["build", "wheel", "test"]
    assert set(re.findall(r"--from=(\w+)", text)) | set(re.findall(r"--target (\w+)", text)) <= set(stages)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", "build", "dist"} <= set(ignored)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for pattern in ignored:  # the container builds and tests all that is committed
        assert not [path for path in listed if PurePath(path).match(pattern) or path.startswith(f"{pattern}/")], pattern


@pytest.mark.parametrize("name", ["wheels.yml", "tests.yml"])
def test_wheels_are_audited(name):
    """By auditwheel and abi3audit, which make wheel runs as well, and by torch-abi-audit, which a test runs as well."""
    audited = "\n".join(steps(HIDDEN / "workflows" / name))
    if name == "wheels.yml":
        audited += "\n".join(PROJECT["tool"]["cibuildwheel"]["repair-wheel-command"])
        assert "torch-abi-audit --check both" in audited
    else:
        assert "make wheel" in audited
        assert any(need.startswith("torch-abi-audit") for need in PROJECT["dependency-groups"]["test"])
        audited += re.search(r"^wheel:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)[1]
    assert "auditwheel repair" in audited
    assert "abi3audit --strict" in audited


@pytest.mark.parametrize("path", PROSE, ids=name_of)
def test_files_that_pages_name_exist(path):
    for name in re.findall(
        r"`((?:\.ci|cpp|python|docs|examples|benchmarks|research|tests|tools|cmake)/[\w./]*)`", path.read_text()
    ):
        assert (ROOT / name).exists(), name


def test_the_changelog_has_a_section_for_what_comes():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n")
    assert re.search(r"^## (Unreleased|\[?\d+\.\d+\.\d+\]? - \d{4}-\d{2}-\d{2})$", text, re.M)
