"""What all implementations have in common: arguments, their refusal, the choice of one, and the reference."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from quire import kernels
from quire.kernels import checks
from quire.kernels.mkl_warmup import FUNCTIONS
from quire.kernels.ops import KernelsUnavailable
from quire.kernels.reference_latent import ReferenceLatentOps
from quire.ops.paths import PROJECT_ROOT
from tests.support.kernels.implementations import HAS_TRITON

# --- every implementation has the operations of the contract, with the same arguments ---------------------------------

OPERATIONS = [name for name, member in vars(kernels.Ops).items() if inspect.isfunction(member) and name[0] != "_"]


def implementation_types() -> list[type]:
    found: list[type] = [kernels.ReferenceOps, kernels.CpuOps]
    if HAS_TRITON:
        from quire.kernels.gpu.ops import TritonOps

        found.append(TritonOps)
    return found


def test_implementations_meet_the_contract():
    assert isinstance(kernels.ReferenceOps(), kernels.Ops)
    assert isinstance(kernels.select_ops("cpu", torch.float32), kernels.Ops)


@pytest.mark.parametrize("kind", implementation_types(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_has_the_arguments_of_the_contract(kind, operation):
    expected, found = (inspect.signature(getattr(one, operation)).parameters for one in (kernels.Ops, kind))
    assert [(one.name, one.default) for one in found.values()] == [(one.name, one.default) for one in expected.values()]


# --- a wrong argument raises the exception of the contract, and its message names the argument ------------------------

ROW = torch.zeros(4)
FLOAT = (torch.float32,)
LOGITS = torch.zeros(2, 8)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: checks.tensor("x", ROW, torch.int32, (4,)), TypeError, "x is torch.float32, not torch.int32"),
        (lambda: checks.tensor("x", ROW, torch.float32, (5,)), ValueError, "x has shape (4,), not (5,)"),
        (lambda: checks.tensor("x", LOGITS.T, torch.float32, (8, 2)), ValueError, "x is not contiguous"),
        (lambda: checks.integers("ids", ROW, (4,)), TypeError, "ids is torch.float32"),
        (
            lambda: checks.linear_weights(torch.zeros(3, 2), FLOAT, (), (), halves=True),
            ValueError,
            "[2I, K]",
        ),
        (lambda: checks.linear_weights(torch.zeros(0, 2), FLOAT, (), ()), ValueError, "[N, K]"),
        (lambda: checks.linear_bias(torch.zeros(2), FLOAT, (3, 2)), ValueError, "bias has shape (2,), not (3,)"),
        (lambda: checks.cache_shape(12, 32), ValueError, "block_size is 12"),
        (lambda: checks.cache_shape(16, 40), ValueError, "head_dim is 40"),
        (lambda: checks.block_moves(ids(0, 3), ids(0, 1), 3, 3), IndexError, "src names a block outside 0..2"),
        (lambda: checks.block_moves(ids(0), ids(-1), 3, 3), IndexError, "dst names a block outside 0..2"),
        (lambda: checks.block_moves(ids(0, 1), ids(2, 2), 3, 3), ValueError, "dst names a block twice"),
        (lambda: checks.block_copies(ids(0, 1), ids(1, 2), 3), ValueError, "dst names a block that src names too"),
        (lambda: checks.logits(ROW), ValueError, "logits has shape (4,), not [R, V]"),
        (lambda: checks.top_logprobs(LOGITS, 9), ValueError, "count is 9: it must be 1..8"),
        (lambda: checks.logprobs_of(LOGITS, ids(1)), ValueError, "ids has shape (1,), not (2,)"),
        (lambda: checks.host_blocks(torch.zeros(2, 3), (4,), torch.float32), ValueError, "host has shape"),
        (lambda: checks.address(torch.zeros(1, device="meta")), ValueError, "a tensor is on meta, not on the CPU"),
    ],
)
def test_a_wrong_argument_is_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_move_between_caches_and_host_may_have_an_id_on_both_sides():
    assert checks.block_moves(ids(1, 2), ids(2, 1), 3, 3) == ([1, 2], [2, 1])


def test_caches_of_any_number_of_heads_are_accepted_without_a_number():
    k, v = torch.zeros(2, 5, 3, 16, 32)
    assert checks.caches(k, v, None, torch.float32) == (5, 3, 16, 32)
    with pytest.raises(ValueError, match="k_cache has shape"):
        checks.caches(k, v, 2, torch.float32)


# --- the choice of an implementation for a device and a dtype ---------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_an_unknown_preference_is_refused():
    with pytest.raises(ValueError, match="prefer"):
        kernels.select_ops("cpu", torch.float32, "fastest")


def test_a_type_without_kernels_falls_back(monkeypatch, caplog):
    monkeypatch.delenv("KERNELS_CPU_ISA", raising=False)
    assert kernels.select_ops("cpu", torch.float16).name == "reference"
    assert "torch.float16" in caplog.text
    with pytest.raises(kernels.KernelsUnavailable):
        kernels.select_ops("cpu", torch.float16, "cpu")


@pytest.mark.slow
def test_kernels_import_nothing_of_the_project():
    code = "import sys, quire.kernels; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "quire.kernels.reference" in done.stdout.split()
    of_others = ("quire.gateway", "quire.worker", "quire.shared", "quire.ops")
    assert not [name for name in done.stdout.split() if name.startswith(of_others)]


# --- kernels that a machine cannot run raise KernelsUnavailable with the remedy ---------------------------------------


def test_a_type_that_no_level_computes_is_refused_with_the_remedy() -> None:
    with pytest.raises(KernelsUnavailable, match=r"float16.*torch\.float32"):
        kernels.select_ops("cpu", torch.float16, "cpu")


# --- the reference in float64, and where it computes in pieces --------------------------------------------------------


def test_sums_are_in_float64_for_float64():
    ops = kernels.ReferenceOps("cpu", torch.float64)
    x = torch.randn(3, 200, dtype=torch.float64)
    weight = torch.randn(200, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-9).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-9), expected, rtol=1e-14, atol=0)


def test_a_head_that_is_multiplied_in_pieces_gives_all_logits():
    ops = kernels.ReferenceOps("cpu", torch.bfloat16)
    weight, bias = torch.randn(20000, 8).bfloat16(), torch.randn(20000).bfloat16()
    x = torch.randn(2, 8).bfloat16()
    logits = ops.linear_logits(x, ops.pack_linear(weight, bias))
    torch.testing.assert_close(logits, F.linear(x.float(), weight.float(), bias.float()))


# --- absorbed attention over latent rows is the attention over the keys and values that are made of them --------------


def test_absorbed_attention_is_that_over_expanded_keys_and_values():
    heads, plain, positional, rank, value = 3, 24, 16, 32, 16
    ops = ReferenceLatentOps(kernels.ReferenceOps(dtype=torch.float64))
    length, count = 21, 5
    of_keys, of_values = torch.randn(heads, plain, rank).double(), torch.randn(heads, value, rank).double()
    rows = torch.randn(length, rank + positional).double()
    q = torch.randn(count, heads, plain + positional).double()

    latents, shared = rows.split([rank, positional], dim=1)
    keys = torch.cat([torch.einsum("kr,hnr->khn", latents, of_keys), shared[:, None].expand(-1, heads, -1)], dim=-1)
    seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, keys).masked_fill(~seen, float("-inf"))
    values = torch.einsum("kr,hvr->khv", latents, of_values)
    expected = torch.einsum("hqk,khv->qhv", scores.softmax(dim=-1), values)

    cache = ops.alloc_latent_cache(4, 8, rank + positional)
    tables = torch.tensor([[3, 0, 2]], dtype=torch.int32)
    at = torch.arange(length)
    ops.cache_latent(rows, tables[0, at // 8] * 8 + at % 8, cache)
    absorbed = ops.linear_groups(q[:, :, :plain].transpose(0, 1).contiguous(), ops.pack_groups(of_keys.mT.contiguous()))
    queries = torch.cat([absorbed.transpose(0, 1), q[:, :, plain:]], dim=-1)
    lengths, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
    mixed = ops.latent_attention(queries, cache, tables, lengths, starts, 1.0, rank)
    found = ops.linear_groups(mixed.transpose(0, 1).contiguous(), ops.pack_groups(of_values)).transpose(0, 1)
    torch.testing.assert_close(found, expected)


# --- no call of torch's vector functions on several threads is a process' first one (kernels/mkl_warmup.py) -----------

CALLED = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Note(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            print(function.overloadpacket.__name__, args[0].dtype, args[0].numel())
        return function(*args, **(kwargs or {}))

with Note():
    from quire import kernels
"""

# Enough values for two threads, as a table of rotary embeddings is.
STARTED = """
import hashlib, torch
from quire import kernels
torch.set_num_threads(2)
values = torch.linspace(0.0, 1000.0, 1 << 16)
results = [function(values) for function in (torch.cos, torch.sin, torch.exp, torch.sqrt)]
print(hashlib.sha256(b"".join(one.numpy().tobytes() for one in results)).hexdigest())
"""


def started(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_importing_the_kernels_calls_each_function_on_one_value() -> None:
    output, _ = started(CALLED).communicate(timeout=120)
    called = Counter(output.splitlines())
    for name in FUNCTIONS:
        for dtype in ("float32", "float64"):
            assert called[f"{name} torch.{dtype} 1"] == 1
    assert all(line.endswith(" 1") for line in called), "work for one thread only"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_processes_that_start_on_a_busy_machine_compute_the_same() -> None:
    """Without the first calls about one in a hundred differs; there are 240, eight at a time."""
    digests: Counter[str] = Counter()
    for _ in range(30):
        processes = [started(STARTED) for _ in range(8)]
        digests.update(process.communicate(timeout=300)[0].strip() for process in processes)
    assert len(digests) == 1, digests
    assert len(next(iter(digests))) == 64
