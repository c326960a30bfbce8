"""The house rules that keep the code small: sizes, names, and imports that point one way."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_MODULE, MAX_FUNCTION, MAX_METHODS, MAX_TEST_MODULE = 400, 60, 15, 600

MAX_FILE = 16 * 2**20  # bytes of a committed file

# From the ground up; a module imports from lower floors only, so there is no cycle.
LAYERS = (
    {"config", "stats", "registry", "block_pool", "kv_cache", "weight_files"},
    {"sequence", "sampling", "progress"},
    {"batch", "memory", "outputs", "lookahead"},
    {"scheduler"},
    {"decode_state", "attention", "requests", "logprobs"},
    {"quant"},
    {"models"},
    {"calibration"},
    {"proposers"},
    {"verifiers"},
    {"decode_step"},
    {"step_graph"},
    {"engine"},
    {"model_pair"},
    {"assembly", "driver"},
    {"llm"},
    {"lossless", "terminal", "distill", "quantize"},
    {"cli", "server", "integrations"},
)
ONLY = {"sampling": {"config"}}  # modules that may use less than all below them
# Words with another name in the field, and the one used here.
WORDS = {
    r"gamma|spec_len|num_spec\w*|speculative_tokens|num_lookahead\w*": "num_draft_tokens",
    r"block_tables": "block_table",
    r"context_lens|kv_lens|seqused_k": "cache_seqlens",
    r"slot_idx|slots_mapping": "slot_mapping",
    r"draft_tokens": "draft_token_ids",
    r"accept_rate|acc_rate": "acceptance_rate",
    r"accept_len\w*|acceptance_length": "mean_accepted_length",
    r"n_accepted|num_accepted_drafts": "num_accepted_tokens",
}
TOP_LEVEL = {"specdec", "proposers", "verifiers", "tests", "benchmarks", "docs", ".ci"}


def sources(*folders: str) -> list[Path]:
    """Python files of the given folders, each once: the links inside specdec/ are not followed."""
    found: list[Path] = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(p.is_symlink() for p in path.parents if p != ROOT and ROOT in p.parents):
                found.append(path)
    return found


LIBRARY = sources("specdec", "proposers", "verifiers", "benchmarks")


def breaches(text: str, max_module: int = MAX_MODULE) -> Iterator[str]:
    """What in a module exceeds its limit."""
    num_lines = len(text.splitlines())
    if num_lines > max_module:
        yield f"module has {num_lines} lines, limit {max_module}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{node.name} has {length} lines, limit {MAX_FUNCTION}"
        if isinstance(node, ast.ClassDef):
            methods = [
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            if len(methods) > MAX_METHODS:
                yield f"class {node.name} has {len(methods)} methods, limit {MAX_METHODS}"


def wrong_words(text: str) -> Iterator[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    for pattern, word in WORDS.items():
        for name in sorted(names):
            if re.fullmatch(pattern, name):
                yield f"{name}: the word here is {word}"


def floor_of(module: str) -> int:
    for floor, names in enumerate(LAYERS):
        if module in names:
            return floor
    raise AssertionError(f"module {module!r} is on no floor: add it to the layer table")


def imported(text: str) -> Iterator[str]:
    """Dotted names of the library's modules that a text imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield from (f"{name}.{a.name}" for a in node.names) if name == "specdec" else [name]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def upward_imports(module: str, text: str) -> Iterator[str]:
    """Imports of a module that do not point to a lower floor."""
    for name in imported(text):
        if name.startswith("."):
            yield f"{module} imports {name}; write the full name, specdec.x.y"
        if not name.startswith("specdec.") or name == "specdec.__version__":
            continue
        other = name.split(".")[1]
        if other == module:
            continue
        if floor_of(other) >= floor_of(module):
            yield f"{module} imports {name}, which is not below it"
        elif other not in ONLY.get(module, {other}):
            yield f"{module} imports {name}, it may use {sorted(ONLY[module])} only"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] in ("proposers", "verifiers") else parts[1]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes_and_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert list(breaches(text)) == []
    assert list(wrong_words(text)) == []


def test_test_modules_stay_readable() -> None:
    for path in sources("tests"):
        text = path.read_text(encoding="utf-8")
        found = [b for b in breaches(text, MAX_TEST_MODULE) if b.startswith("module")]
        assert found == [], path.name


def test_imports_point_one_way() -> None:
    for path in sources("specdec", "proposers", "verifiers"):
        if path == ROOT / "specdec" / "__init__.py":  # the library's face, above all floors
            continue
        found = list(upward_imports(module_name(path), path.read_text(encoding="utf-8")))
        assert found == []


def committed() -> list[str]:
    """Files that git tracks; none known (a downloaded archive, no git) skips the test."""
    try:
        result = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in result.stdout.split("\0") if name]


def stray(names: list[str]) -> set[str]:
    """Folders of committed files that have no place in the house."""
    return {name.split("/")[0] for name in names if "/" in name} - TOP_LEVEL


def too_large(root: Path, names: list[str]) -> list[str]:
    paths = ((name, root / name) for name in names)
    return [name for name, path in paths if path.is_file() and path.stat().st_size > MAX_FILE]


def test_committed_files_are_small_and_in_their_folders() -> None:
    names = committed()
    assert stray(names) == set()
    assert too_large(ROOT, names) == []


def test_each_check_catches_a_breach() -> None:
    """Positive controls: a text that breaks each rule."""
    long_function = "def f():\n" + "    x = 1\n" * 60
    many_methods = "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(16))
    assert any("f has 61 lines" in b for b in breaches(long_function))
    assert any("16 methods" in b for b in breaches(many_methods))
    assert any("401 lines" in b for b in breaches("x = 1\n" * 401))
    assert list(wrong_words("def f(gamma): ...")) == ["gamma: the word here is num_draft_tokens"]
    assert list(wrong_words("f(gamma=1)")) and list(wrong_words("async def gamma(): ..."))
    for upward in ("from specdec.engine import Engine", "import specdec.llm", "from . import llm"):
        assert list(upward_imports("batch", upward)), upward
    assert list(upward_imports("engine", "from specdec import llm"))
    assert list(upward_imports("proposers", "from specdec.verifiers.base import Verifier"))
    assert list(upward_imports("sampling", "from specdec.block_pool import BlockPool"))
    assert list(upward_imports("sampling", "from specdec.config import SamplingParams")) == []
    with pytest.raises(AssertionError, match="add it to the layer table"):
        floor_of("nowhere")


def test_stray_and_large_files_are_caught(tmp_path: Path) -> None:
    assert stray(["README.md", "docs/a.md", "notes/b.md"]) == {"notes"}
    for name, size in (("fits", MAX_FILE), ("large", MAX_FILE + 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    assert too_large(tmp_path, ["fits", "large", "missing"]) == ["large"]
