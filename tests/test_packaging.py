"""The wheel holds the library and nothing else; the public names can be imported."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import specdec

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """File names in a wheel built from a copy without the build's leftovers; git is not needed."""
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    for folder in ("specdec", "proposers", "verifiers", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(out), str(source)], check=True, capture_output=True
    )
    (wheel,) = out.glob("specdec_paged-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_the_whole_library(wheel_names: list[str]) -> None:
    expected = {
        f"specdec/{path.relative_to(ROOT / 'specdec')}"
        for path in (ROOT / "specdec").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    for folder in ("proposers", "verifiers"):
        expected |= {f"specdec/{folder}/{p.name}" for p in (ROOT / folder).glob("*.py")}
    assert expected | {"specdec/py.typed"} <= set(wheel_names)


def test_the_wheel_holds_nothing_else(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert tops == {"specdec", f"specdec_paged-{specdec.__version__}.dist-info"}


def test_every_package_is_listed() -> None:
    """A new folder that is left out of the list would be missing from the wheel."""
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "specdec").rglob("__init__.py")
    }
    folders |= {"specdec.proposers", "specdec.verifiers"}
    assert set(CONFIG["tool"]["setuptools"]["packages"]) == folders


def test_version_is_the_same_everywhere() -> None:
    assert CONFIG["project"]["version"] == specdec.__version__


@pytest.mark.parametrize("name", ["proposers", "verifiers"])
def test_links_are_relative(name: str) -> None:
    link = ROOT / "specdec" / name
    assert link.is_symlink() and link.readlink() == Path("..") / name


def test_public_names_can_be_imported() -> None:
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None


def test_each_class_has_one_module() -> None:
    module = importlib.import_module("specdec.proposers.draft_model")
    assert module.DraftModelProposer.__module__ == "specdec.proposers.draft_model"


def test_the_second_job_names_files_that_exist() -> None:
    """pytest would stop with a usage error, but only after that environment was built."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    match = re.search(r"^TRANSFORMERS4_TESTS \?= (.+)$", makefile, re.MULTILINE)
    assert match
    assert [name for name in match[1].split() if not (ROOT / name).is_file()] == []


def test_both_constraint_files_pin_torch() -> None:
    for name in ("constraints.txt", "constraints-transformers4.txt"):
        assert "\ntorch==" in (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_names_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("<!-- ci: commands -->")[1].split("```bash\n")[1].split("```")[0]
    assert block.split("\n")[:2] == ["make demo", "make test"]
