"""Which backend `auto` takes and why; how the triton backend shares out its work. Needs neither a
GPU nor triton.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attention_cases import make_problem
from fake_flash import FakeFlash
from triton_interpreter import interpreting

from specdec.attention import flash_attn, triton_attn
from specdec.attention.select import select_backend
from specdec.attention.triton_attn import TritonBackend, TritonPlan, tile_shape

CUDA = torch.device("cuda")
HALF = (torch.float16, 128)
SHARED_MEMORY = 227 * 1024  # bytes a program may have on an H200


def missing(name: str) -> ImportError:
    return ImportError(f"install {name}")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Only the packages in the parameter can be imported."""

    def flash_module() -> FakeFlash:
        if "flash" in request.param:
            return FakeFlash()
        raise missing("flash-attn")

    def load_kernels() -> None:
        if "triton" not in request.param:
            raise missing("triton")

    monkeypatch.setattr(flash_attn, "flash_module", flash_module)
    monkeypatch.setattr(triton_attn, "load_kernels", load_kernels)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("installed", "model", "name", "reason"),
    [
        (("flash", "triton"), HALF, "flash_attn", "flash_attn serves this model"),
        (("triton",), HALF, "triton", "triton serves this model; install flash-attn"),
        (("flash", "triton"), (torch.float32, 64), "triton", "takes float16 or bfloat16"),
        ((), HALF, "reference", "install flash-attn; install triton"),
        (("flash", "triton"), (torch.float16, 320), "reference", "triton takes head_dim up to"),
    ],
    indirect=["installed"],
)
def test_auto_takes_the_fastest_that_serves(
    model: tuple[torch.dtype, int], name: str, reason: str
) -> None:
    choice = select_backend("auto", CUDA, [model])
    assert choice.backend.name == name
    assert reason in choice.reason


@pytest.mark.skipif(interpreting(), reason="the interpreter serves the CPU")
def test_triton_refuses_the_cpu() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu; use attention='auto'"):
        select_backend("triton", torch.device("cpu"), [HALF])


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is here")
def test_a_missing_triton_names_the_package_to_install() -> None:
    with pytest.raises(ImportError, match="pip install triton"):
        select_backend("triton", CUDA, [HALF])


def test_splits_fill_the_device_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a long text is shared out, many rows are not, and a short text is left whole."""
    monkeypatch.setattr(triton_attn, "_num_programs", lambda device: 264)
    backend = TritonBackend()
    for (rows, kv_heads, keys), splits in {
        (1, 8, 4096): 32,
        (1, 8, 100): 1,
        (1, 1, 100_000): 64,
        (8, 8, 4096): 4,
        (32, 8, 4096): 1,
        (500, 8, 4096): 1,
    }.items():
        assert backend._splits(rows * kv_heads, keys, CUDA) == splits


@pytest.mark.parametrize("group", [1, 3, 8])
def test_ragged_tiles_cover_every_query_once(group: int) -> None:
    batch = make_problem([0, 9, 40], [1, 70, 6]).batch
    tiles = TritonPlan().ragged_tiles(batch, group, 64).tolist()
    q_rows = [group * n for n in (1, 70, 6)]
    covered = sorted(
        (row, r) for row, first in tiles for r in range(first, min(first + 64, q_rows[row]))
    )
    assert covered == [(row, r) for row, n in enumerate(q_rows) for r in range(n)]
    keys = [[0, 9, 40][row] * group + first for row, first in tiles]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("packed_rows", [16, 100_000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_compile_for_an_h200(head_dim: int, packed_rows: int) -> None:
    """Without a GPU: the code for sm_90 exists and its tiles fit the shared memory."""
    triton = pytest.importorskip("triton")
    kernel = triton_attn.load_kernels().attend_kernel
    shape = tile_shape(head_dim, torch.bfloat16, packed_rows)
    constants = {"GROUP": 8, "PAGE": 64, "WINDOW": 0, "SOFTCAP": 0.0, "SPLIT": True}
    constants |= {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "HAS_TILES": False, "GUARD": True}
    constants |= {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "BLOCK_NEW": 16}
    kinds = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), "*bf16")
    kinds |= dict.fromkeys(("out", "lse"), "*fp32") | {"slot_mapping": "*i64", "scale": "fp32"}
    kinds |= dict.fromkeys(("cu_seqlens_q", "cache_seqlens", "block_table", "tiles"), "*i32")
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind[0] == "*" or name.endswith(("_token", "_head"))
    }
    compiled = triton.compile(
        triton.compiler.ASTSource(kernel, signature, constants, aligned),
        target=triton.backends.compiler.GPUTarget("cuda", 90, 32),
        options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )
    assert 0 < compiled.metadata.shared <= SHARED_MEMORY
