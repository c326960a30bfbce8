"""Triton's interpreter, for tests of kernels on a machine without a CUDA device."""

from __future__ import annotations

import os
from typing import Any


def interpreting() -> bool:
    """Whether kernels are interpreted. Triton decides when it is imported, so the variable is set
    outside: TRITON_INTERPRET=1 pytest ...
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def let_loops_run() -> None:
    """NumPy 2.4 makes no integer of an array of one element; the interpreter's loop bounds are
    such.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
