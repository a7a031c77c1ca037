"""KV stored as fp8 on the CPU: codes and scales of the twins, attention close to theirs, which bits depend on what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.kernel_case import DTYPES
from tournant.kernels import ops, reference
from tournant.kernels.layout import KVLayout
from tournant.kernels.plan import AttentionPlan

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMS = {E4M3: 448.0, E5M2: 57344.0}  # the largest number of each
LAYER = 1

pytestmark = pytest.mark.usefixtures("compiled")


class Pool:
    """Two layers of KV in an fp8 form; what is not stored is NaN."""

    def __init__(self, form: torch.dtype, num_blocks: int, kv_heads: int = 2, size: int = 64, tokens: int = 16) -> None:
        self.layout = KVLayout(2, kv_heads, tokens, size, form)
        self.kv = torch.full(self.layout.shape(num_blocks), 0x7F, dtype=torch.uint8).view(form)
        self.scales = self.layout.allocate_scales(num_blocks)
        if self.scales is not None:
            self.scales.fill_(float("nan"))

    def equals(self, other: Pool) -> bool:
        scales = self.scales is None or bool((self.scales.nan_to_num() == other.scales.nan_to_num()).all())
        return scales and torch.equal(self.kv.view(torch.uint8), other.kv.view(torch.uint8))

    def store(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        ops.store_kv(k, v, self.kv, LAYER, slots, kv_scales=self.scales)


def numbers(form: torch.dtype) -> torch.Tensor:
    """Every number of a form, what lies halfway between two, floats of every size: 8192 in all, the largest first."""
    every = torch.arange(256, dtype=torch.uint8).view(form).float()
    every = every[every.isfinite()].sort().values
    scattered = torch.cat([torch.randn(400) * 10.0**power for power in range(-9, 6)]).clamp(-FORMS[form], FORMS[form])
    x = torch.cat([torch.tensor([FORMS[form], -0.0]), every, (every[:-1] + every[1:]) / 2, scattered])
    return torch.cat([x, torch.zeros(8192 - len(x))])


@pytest.mark.parametrize("form", FORMS)
def test_codes_equal_those_of_torch(form: torch.dtype) -> None:
    x = numbers(form).view(128, 1, 64)
    pool = Pool(form, 1, kv_heads=1, tokens=128)
    pool.store(x, -x, torch.arange(128))
    for which, wanted in enumerate((x, -x)):
        assert torch.equal(pool.kv[0, LAYER, which, 0].view(torch.uint8), wanted[:, 0].to(form).view(torch.uint8))
    if pool.scales is not None:
        assert pool.scales[0, LAYER].flatten().tolist() == [1.0, 1.0]


def test_e5m2_saturates() -> None:
    pool, x = Pool(E5M2, 1), torch.full((1, 2, 64), 1e9)
    x[0, 0] = float("-inf")
    pool.store(x, x, torch.tensor([3]))
    assert pool.kv[0, LAYER, 1, :, 3].float().unique().tolist() == [-57344.0, 57344.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("threads")
def test_stores_equal_their_twins(form: torch.dtype, dtype: torch.dtype) -> None:
    """Rotated or not, blocks that begin anew or grow, with values of all sizes; some rows are padding."""
    ours, twins = Pool(form, 4, size=80), Pool(form, 4, size=80)
    for number in range(24):
        torch.set_num_threads(1 + number % 2)
        start = int(torch.randint(0, 63, ()))
        count = min(int(torch.randint(1, 40, ())), 64 - start)
        if start % 16 and ours.scales is not None:
            start, count = start // 16 * 16, count + start % 16  # a scale is valid once a first token was stored
        slots = torch.arange(start, start + count)
        slots[1:][torch.rand(count - 1) < 0.1] = -1
        q, k, v = (torch.randn(count, heads, 80) for heads in (6, 2, 2))
        k *= 10.0 ** torch.empty(count, 2, 1).uniform_(-4, 3)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if number % 3 == 0:
            ours.store(k, v, slots)
            reference.store_kv(k, v, twins.kv, LAYER, slots, kv_scales=twins.scales)
            continue
        table, positions = torch.rand(100, 32), torch.randint(0, 100, (count,))
        mine, other = q.clone(), q.clone()
        ops.rope_store_kv(mine, k, v, table, positions, ours.kv, LAYER, slots, kv_scales=ours.scales)
        args = (table, positions, twins.kv, LAYER, slots)
        reference.rope_store_kv(other, k, v, *args, kv_scales=twins.scales)
        torch.testing.assert_close(mine, other)
    assert ours.equals(twins)


def test_a_growing_block_equals_its_twin() -> None:
    """Token by token, each larger than those before, so that the scale rises and codes become subnormal."""
    ours, twins = Pool(E4M3, 1), Pool(E4M3, 1)
    for token in range(16):
        x, slots = torch.randn(1, 2, 64) * 3.0**token, torch.tensor([token])
        ours.store(x, -x, slots)
        reference.store_kv(x, -x, twins.kv, LAYER, slots, kv_scales=twins.scales)
    assert ours.equals(twins)
    assert float(ours.scales[0, LAYER].min()) > 2**10


class Step:
    """Sequences of `lengths` tokens stored in scattered blocks, the last `queries` rows of each asking."""

    def __init__(
        self, form: torch.dtype, dtype: torch.dtype, heads: int, kv_heads: int, size: int, tokens: int
    ) -> None:
        self.lengths, self.queries = [1, 300, 700, 33], [1, 1, 50, 33]
        counts = [-(-length // tokens) for length in self.lengths]
        self.pool = Pool(form, sum(counts) + 1, kv_heads, size, tokens)
        self.tables, self.heads = np.full((len(counts), max(counts)), -7, np.int32), heads
        shuffled = torch.randperm(sum(counts) + 1)[: sum(counts)].numpy()
        for table, own, length in zip(
            self.tables, np.split(shuffled, np.cumsum(counts)[:-1]), self.lengths, strict=True
        ):
            table[: len(own)] = own
            k, v = ((torch.randn(length, kv_heads, size) * torch.rand(length, 1, 1) * 3).to(dtype) for _ in range(2))
            self.pool.store(k, v, torch.from_numpy(self.pool.layout.slots(table, np.arange(length))))
        self.q = torch.randn(sum(self.queries), heads, size).to(dtype)

    def plan(self, seqs: list[int], queries: list[int], contexts: list[int]) -> AttentionPlan:
        starts = np.cumsum([0, *queries])
        return ops.plan_attention(self.tables[seqs], starts, contexts, self.pool.layout, self.heads)

    def whole(self) -> AttentionPlan:
        return self.plan([0, 1, 2, 3], self.queries, self.lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "window", "softcap"), [((9, 3, 64, 16), 0, 0.0), ((4, 2, 80, 8), 100, 5.0)])
def test_attention_equals_its_twin(
    form: torch.dtype, dtype: torch.dtype, shape: tuple[int, int, int, int], window: int, softcap: float
) -> None:
    step = Step(form, dtype, *shape)
    results = []
    for attention in (ops.paged_attention, reference.paged_attention):
        out, lse = torch.empty_like(step.q), torch.empty(step.q.shape[:2])
        options = (window, softcap, lse)
        attention(out, step.q, step.pool.kv, LAYER, step.whole(), 0.125, *options, kv_scales=step.pool.scales)
        results.append((out, lse))
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(ours, twin, rtol=tolerance / 4, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("threads")
def test_bits_of_attention_do_not_depend_on_chunks_batch_or_threads(form: torch.dtype, dtype: torch.dtype) -> None:
    step = Step(form, dtype, 10, 2, 80, 8)
    args = (step.pool.kv, LAYER)
    together = torch.empty_like(step.q)
    torch.set_num_threads(2)
    ops.paged_attention(together, step.q, *args, step.whole(), 0.125, kv_scales=step.pool.scales)
    torch.set_num_threads(1)
    for first, count in ((2, 1), (3, 7), (10, 42), (52, 33)):
        seq, rows = (3 if first == 52 else 2), slice(first, first + count)
        context = 650 + first - 2 + count if seq == 2 else 33
        out = torch.empty_like(step.q[rows])
        plan = step.plan([seq], [count], [context])
        ops.paged_attention(out, step.q[rows], *args, plan, 0.125, kv_scales=step.pool.scales)
        assert torch.equal(out, together[rows])


def test_stored_bits_depend_on_what_was_stored_together_for_e4m3_alone() -> None:
    """Why deterministic mode refuses e4m3: the last token is the largest, and small ones become subnormal under it."""
    x = torch.randn(16, 2, 64) * 0.01
    x[15] *= 1e5
    for form in FORMS:
        whole, one_by_one = Pool(form, 1), Pool(form, 1)
        whole.store(x, x, torch.arange(16))
        for token in range(16):
            one_by_one.store(x[token : token + 1], x[token : token + 1], torch.tensor([token]))
        assert one_by_one.equals(whole) == (form == E5M2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_images_of_blocks(form: torch.dtype, dtype: torch.dtype) -> None:
    """Equal to the twins', equal to what storing the tokens gives, and back within the form's rounding."""
    layout = KVLayout(3, 2, 16, 80, dtype)
    pool = torch.randn(layout.shape(6)).to(dtype) * torch.rand(6, 3, 2, 2, 1, 1).to(dtype)
    pool[4] = 0
    coded = KVLayout(3, 2, 16, 80, form)
    ids, results = torch.tensor([5, 0, 4]), []
    for module in (ops, reference):
        images, back = torch.full((3, coded.block_bytes), 9, dtype=torch.uint8), pool.clone()
        module.encode_blocks(pool, ids, images, form)
        module.decode_blocks(images, form, torch.tensor([1, 2, 3]), back)
        results.append((images, back))
    (images, back), (twin_images, twin_back) = results
    assert torch.equal(images, twin_images)
    assert torch.equal(back, twin_back)
    assert torch.equal(back[[0, 4, 5]], pool[[0, 4, 5]])
    step = 2**-4 if form == E4M3 else 2**-3
    torch.testing.assert_close(back[[1, 2, 3]], pool[ids], rtol=step, atol=2**-9)
    stored, k_v = Pool(form, 1, size=80), pool[5, LAYER].transpose(1, 2)
    stored.store(k_v[0].contiguous(), k_v[1].contiguous(), torch.arange(16))
    codes = images[0, : coded.token_bytes * 16].view(3, -1)[LAYER]
    assert torch.equal(codes, stored.kv[0, LAYER].reshape(-1).view(torch.uint8))


def test_an_image_of_large_float16_numbers_stays_finite() -> None:
    pool = torch.full(KVLayout(1, 1, 8, 16, torch.float16).shape(2), 65504.0, dtype=torch.float16)
    images = torch.empty(1, KVLayout(1, 1, 8, 16, E4M3).block_bytes, dtype=torch.uint8)
    ops.encode_blocks(pool, torch.tensor([0]), images, E4M3)
    ops.decode_blocks(images, E4M3, torch.tensor([1]), pool)
    assert bool((pool == 65504).all())


def test_what_does_not_fit_is_refused() -> None:
    e4m3, e5m2, x, slots = Pool(E4M3, 2), Pool(E5M2, 2), torch.zeros(3, 2, 64), torch.arange(3)
    plain = torch.zeros(e5m2.layout.shape(2))
    images = torch.zeros(1, e5m2.layout.block_bytes, dtype=torch.uint8)
    for message, call in (
        ("needs kv_scales", lambda: ops.store_kv(x, x, e4m3.kv, 0, slots)),
        ("needs kv_scales", lambda: ops.store_kv(x, x, e5m2.kv, 0, slots, kv_scales=e4m3.scales)),
        ("needs kv_scales", lambda: ops.store_kv(x, x, plain, 0, slots, kv_scales=e4m3.scales)),
        ("kv_scales is", lambda: ops.store_kv(x, x, e4m3.kv, 0, slots, kv_scales=e4m3.scales[:1])),
        ("k is", lambda: ops.store_kv(x.to(E5M2), x.to(E5M2), e5m2.kv, 0, slots)),
        ("v is", lambda: ops.store_kv(x, x.half(), e5m2.kv, 0, slots)),
        ("pool is", lambda: ops.encode_blocks(e5m2.kv, torch.tensor([0]), images, E5M2)),
        ("ids is", lambda: ops.encode_blocks(plain, torch.tensor([0]).int(), images, E5M2)),
        ("ids reach from 2 to 2; the pool has 2", lambda: ops.encode_blocks(plain, torch.tensor([2]), images, E5M2)),
        ("images is", lambda: ops.encode_blocks(plain, torch.tensor([0]), images, E4M3)),
        ("images is", lambda: ops.decode_blocks(images, E5M2, torch.tensor([0, 1]), plain)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
