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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
PROSE = [HIDDEN / "CONTRIBUTING.md", HIDDEN / "SECURITY.md", ROOT / "docs/install.md"]


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
