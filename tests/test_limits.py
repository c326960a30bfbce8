"""The house rules that keep the code small: sizes, names, and imports that point one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_MODULE, MAX_FUNCTION, MAX_METHODS, MAX_TEST_MODULE = 400, 60, 15, 600

# From the ground up; a module imports from its own floor or from below.
LAYERS = (
    {"config", "stats", "registry", "block_pool", "kv_cache"},
    {"sequence", "sampling", "progress"},
    {"batch", "memory", "outputs", "scheduler"},
    {"decode_state", "attention", "requests"},
    {"models"},
    {"proposers", "verifiers"},
    {"engine"},
    {"assembly", "driver"},
    {"llm"},
    {"lossless", "terminal"},
    {"cli"},
)
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
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
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


def upward_imports(module: str, text: str) -> Iterator[str]:
    """Imports of a module that point to a higher floor."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdec."):
            other = (node.module or "").split(".")[1]
            if other != module and floor_of(other) > floor_of(module):
                yield f"{module} imports {node.module}, which is above it"


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
        if path.name == "__init__.py":
            continue
        found = list(upward_imports(module_name(path), path.read_text(encoding="utf-8")))
        assert found == []


def test_top_level_folders_are_fixed() -> None:
    own = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
    generated = {"build", "dist"} | {n for n in own if n.endswith(".egg-info")}
    assert own - generated - TOP_LEVEL == set()


def test_each_check_catches_a_breach() -> None:
    """Positive controls: a text that breaks each rule."""
    long_function = "def f():\n" + "    x = 1\n" * 60
    many_methods = "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(16))
    assert any("f has 61 lines" in b for b in breaches(long_function))
    assert any("16 methods" in b for b in breaches(many_methods))
    assert any("401 lines" in b for b in breaches("x = 1\n" * 401))
    assert list(wrong_words("def f(gamma): ...")) == ["gamma: the word here is num_draft_tokens"]
    assert list(upward_imports("batch", "from specdec.engine import Engine"))
    with pytest.raises(AssertionError, match="add it to the layer table"):
        floor_of("nowhere")
