"""Tables and addresses in the documentation agree with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import mgpu_check
from mgpu_check import version
from mgpu_check.cli import compare, model, record, simulate
from mgpu_check.settings import all_options
from tests.docs.pages import DOCS, ROOT, all_pages, blocks

PACKAGE = Path(mgpu_check.__file__).parent
FRAGMENTS = ROOT / "changelog.d"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_option_has_a_row_with_its_three_spellings_and_its_default() -> None:
    rows = re.findall(r"^\| `(--[\w-]+).*?\| `(\w+)` \| `(\w+)` \| (.*) \|$", _reference("options"), re.MULTILINE)
    assert [row[:3] for row in rows] == [
        (option.flag, option.name, option.variable) for option in all_options().values()
    ]
    for (*_, text), option in zip(rows, all_options().values(), strict=True):
        if option.default.isdecimal():
            assert f"Default: {option.default}" in text


def test_the_options_of_the_commands_that_pages_show_exist(pytestconfig: pytest.Config) -> None:
    parser = pytestconfig._parser
    of_pytest = {
        name for group in [*parser._groups, parser._anonymous] for one in group.options for name in one.names()
    }
    of_pytest |= {
        "--quick",
        "--all-pairs",
        "--seeds",
        "--reports",
        "--collect-only",
    }  # of selftest, and of the examples' own conftest
    known = {
        "accept": of_pytest
        | {f"--{option.name.removeprefix('accept_').replace('_', '-')}" for option in all_options().values()},
        "compare": set(compare._parser()._option_string_actions),
        "model": of_pytest | {*model._OWN},
        "record": set(record._parser()._option_string_actions),
        "simulate": set(simulate._parser()._option_string_actions),
    }
    shown = 0
    for page in all_pages():
        for block in blocks(page, "sh"):
            for command in re.findall(r"(?:mgpu-check|mgpu_check|pytest) (.*)", block.text.replace("\\\n", " ")):
                own, _, _ = command.partition("#")[0].partition(" -- ")
                words = own.split()
                options = known.get(" ".join(words[:2]), known.get(words[0], of_pytest)) if words else of_pytest
                for word in words:
                    if word.startswith("--"):
                        shown += 1
                        assert word.partition("=")[0] in options, f"{page}: {command}"
    assert shown > 20


def test_every_public_name_is_in_the_api_reference() -> None:
    named = re.findall(r"^::: mgpu_check\.(\w+)$", _reference("api"), re.MULTILINE)
    assert sorted(named) == sorted([*mgpu_check.__all__, "strategies"])


def test_the_supported_versions_are_those_of_the_project() -> None:
    table = _reference("versions").partition("## What is public")[0]
    shown = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) or newer", table, re.MULTILINE))
    requirements = [re.match(r"([\w-]+)>=([\d.]+)$", text) for text in project()["project"]["dependencies"]]
    assert all(requirements)
    least = {match[1]: match[2] for match in requirements if match} | {
        "Python": project()["project"]["requires-python"].removeprefix(">=")
    }
    assert {name.lower(): version for name, version in shown.items()} == {n.lower(): v for n, v in least.items()}


def test_pages_that_the_code_names_exist() -> None:
    named = {page for path in PACKAGE.rglob("*.py") for page in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert named
    assert [page for page in named if not (ROOT / page).exists()] == []


def test_packages_and_modules_that_the_pages_for_maintainers_name_exist() -> None:
    pages = [DOCS / "architecture.md", *(DOCS / "maintainers").glob("*.md")]
    modules = {name for page in pages for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text())}
    assert modules
    assert [name for name in sorted(modules) if not any((top / name).is_file() for top in (PACKAGE, ROOT))] == []
    shown = set(
        re.findall(r"^::: mgpu_check\.(\w+)$", (DOCS / "maintainers" / "packages.md").read_text(), re.MULTILINE)
    )
    assert shown == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    flowchart = next(block.text for block in blocks(pages[0], "mermaid") if block.text.startswith("flowchart"))
    packages = {name for words in re.findall(r' \w+\["([\w, ]+)"\]', flowchart) for name in words.split(", ")}
    packages -= {"pytest process", "fork server of each host", "each rank", "and the node process"}  # titles
    assert packages
    assert [name for name in sorted(packages) if not (PACKAGE / name / "__init__.py").is_file()] == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_pin_actions_by_hash_and_name_environments_of_tox(path: Path) -> None:
    """A tag of an action can be moved to other code; the comment says which version the hash is."""
    text = path.read_text()
    for action in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)
    environments = set(
        re.split(r"[\s{},:]+", " ".join(re.findall(r"^\[testenv:(.*)\]$", (ROOT / "tox.ini").read_text(), re.M)))
    )
    for listed in re.findall(r"^ +(?:environment|python): \[(.*)\]$", text, re.M):
        assert {name.strip(' "') for name in listed.split(",")} <= environments


def test_links_of_the_readme_are_absolute_on_a_package_index() -> None:
    """A package index shows the README without the files beside it: the build makes its links absolute."""
    text = (ROOT / "README.md").read_text()
    links = _links(text)
    assert [link for link in links if "://" not in link]
    for rule in project()["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    files = project()["project"]["urls"]["Source"] + "/blob/main/"
    assert _links(text) == [link if "://" in link else files + link for link in links]


def _links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("path", sorted(FRAGMENTS.glob("*")), ids=lambda path: path.name)
def test_a_fragment_of_the_changelog_has_a_type_and_a_sentence(path: Path) -> None:
    if path.name == "README.md":
        return
    types = [one["directory"] for one in project()["tool"]["towncrier"]["type"]]
    assert re.fullmatch(rf"(\d+|\+[\w-]+)\.({'|'.join(types)})(\.\d+)?\.md", path.name)
    text = path.read_text().strip()
    assert text.endswith((".", ".`")) and "\n\n" not in text


def test_the_changelog_has_the_place_where_releases_begin_and_this_version() -> None:
    before, start, releases = (
        (ROOT / "CHANGELOG.md").read_text().partition(project()["tool"]["towncrier"]["start_string"])
    )
    assert before and start
    assert re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", releases, re.MULTILINE)[0] == version.__version__


def _reference(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text()
