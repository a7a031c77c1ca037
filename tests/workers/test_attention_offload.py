"""Attention with its matrix wherever there is room: torch's own result, and the same bits wherever tiles lay."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tests.helpers.faulty_disk import FaultyDisk
from tournant.workers import attention_tiles as tiles
from tournant.workers.attention_offload import AttentionWithOffload, KVPair
from tournant.workers.attention_tiles import Rows, Scoring, cut_rows
from tournant.workers.errors import ConfigError
from tournant.workers.spill_file import SpillError
from tournant.workers.tile_ledger import Tier

HIDDEN, HEADS, KV_HEADS, TOKENS = 64, 4, 2, 700
MIB = 1 << 20


def make(offload_to: str, granularity: str, **options: object) -> AttentionWithOffload:
    """A module whose weights are always the same."""
    torch.manual_seed(1)
    return AttentionWithOffload(HIDDEN, HEADS, offload_to, granularity, num_kv_heads=KV_HEADS, **options)  # type: ignore[arg-type]


def inputs(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(2))


def reference(module: AttentionWithOffload, x: torch.Tensor) -> torch.Tensor:
    """The same by torch, in float64."""
    twin = make("none", "layer").double()
    twin.load_state_dict({name: weight.double() for name, weight in module.state_dict().items()})
    q, k, v = (
        part(x.double()).view(*x.shape[:2], -1, HIDDEN // HEADS).transpose(1, 2) for part in (twin.q, twin.k, twin.v)
    )
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return twin.o(out.transpose(1, 2).flatten(2))


PLACES = [
    ("none", "head", {}),
    ("cpu", "layer", {"device_bytes": 2 * MIB}),
    ("cpu", "head", {"device_bytes": MIB // 2}),
    ("ssd", "layer", {"device_bytes": 2 * MIB, "host_bytes": 2 * MIB}),
    ("ssd", "head", {"device_bytes": MIB // 2, "host_bytes": MIB // 2}),
]


@pytest.fixture(scope="module")
def resident() -> tuple[torch.Tensor, KVPair]:
    out, cache = make("none", "layer")(inputs())
    return out, cache


def test_it_is_attention(resident: tuple[torch.Tensor, KVPair]) -> None:
    assert (reference(make("none", "layer"), inputs()) - resident[0]).abs().max() < 1e-6
    assert not resident[0].requires_grad


@pytest.mark.parametrize(("offload_to", "granularity", "options"), PLACES)
def test_the_same_bits_wherever_tiles_are(
    offload_to: str,
    granularity: str,
    options: dict[str, int],
    resident: tuple[torch.Tensor, KVPair],
    tmp_path: Path,
) -> None:
    module = make(offload_to, granularity, folder=tmp_path, **options)
    out, cache = module(inputs())
    assert torch.equal(out, resident[0])
    assert all(torch.equal(*pair) for pair in zip(cache, resident[1], strict=True))
    assert len(module.stats) == 2  # one arena for each sequence
    for stats in module.stats:
        if offload_to != "none":
            assert stats.moved[Tier.DEVICE, Tier.HOST] == stats.moved[Tier.HOST, Tier.DEVICE] > MIB / 4
        if offload_to == "ssd":
            assert stats.moved[Tier.HOST, Tier.BOTTOM] == stats.moved[Tier.BOTTOM, Tier.HOST] > MIB / 4
            assert stats.peak_bytes <= options["device_bytes"] + options["host_bytes"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("offload_to", "granularity", "options"), [("none", "layer", {}), *PLACES[3:]])
def test_tokens_that_follow_a_cache(offload_to: str, granularity: str, options: dict[str, int], tmp_path: Path) -> None:
    """Three calls and a decoding step: close to one call, and the same bits wherever tiles are."""
    module, resident = make(offload_to, granularity, folder=tmp_path, **options), make("none", "layer")
    x, cache, other = inputs(), None, None
    whole = resident(x)[0]
    for begin, end in ((0, 300), (300, 301), (301, TOKENS)):
        out, cache = module(x[:, begin:end], cache)
        wanted, other = resident(x[:, begin:end], other)
        assert torch.equal(out, wanted)
        assert (out - whole[:, begin:end]).abs().max() < 1e-6
    assert cache.keys.shape == (2, KV_HEADS, TOKENS, HIDDEN // HEADS)


def test_keys_larger_than_the_device_leave_it_and_change_nothing(tmp_path: Path) -> None:
    """4 MB of keys for a decoding step whose probabilities are 32 KB."""
    sources = [torch.randn(1, 2, 4000, 128, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]
    x, found = torch.randn(1, 1, 256, generator=torch.Generator().manual_seed(5)), []
    for offload_to in ("none", "ssd"):
        torch.manual_seed(1)
        capacity = None if offload_to == "none" else 4 * MIB
        module = AttentionWithOffload(
            256, 2, offload_to, device_bytes=capacity, host_bytes=capacity, folder=tmp_path, bias=True
        )
        found.append(module(x, KVPair(*sources))[0])
    assert torch.equal(*found)
    assert module.stats[0].moved[Tier.HOST, Tier.DEVICE] > MIB


@pytest.mark.parametrize("tokens", [33, 1025])
@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(17, 2, 2), (5, 6, 2)])
def test_the_same_bits_where_heads_do_not_begin_at_aligned_addresses(
    size: int, heads: int, kv_heads: int, tokens: int, tmp_path: Path
) -> None:
    x, found = torch.randn(1, tokens, size * heads, generator=torch.Generator().manual_seed(3)), []
    for offload_to, granularity in (("none", "layer"), ("none", "head"), ("ssd", "head")):
        torch.manual_seed(1)
        module = AttentionWithOffload(
            size * heads, heads, offload_to, granularity, num_kv_heads=kv_heads, folder=str(tmp_path)
        )
        found.append(module(x)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload_to": "gpu"}, "'gpu'; it must be one of none, cpu, ssd"),
        ({"granularity": "token"}, "'token'; it must be one of layer, head"),
        ({"num_kv_heads": 3}, "num_heads is 4; it must be a multiple of num_kv_heads, 3"),
        ({"hidden_dim": 62}, "hidden_dim is 62"),
        ({"device_bytes": 0}, "device_bytes is 0; it must be a whole number from 1, or None"),
        ({"device_bytes": float("nan")}, "device_bytes is nan"),
        ({"host_bytes": "64MB"}, "host_bytes is '64MB'"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, object], said: str) -> None:
    arguments = {"hidden_dim": HIDDEN, "num_heads": HEADS, **options}
    with pytest.raises(ConfigError, match=said):
        AttentionWithOffload(**arguments)  # type: ignore[arg-type]


def test_calls_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"x is \(1, 3, 5\); it must be \[1 or more sequences, 1 or more tokens, 64"):
        make("none", "layer")(torch.zeros(1, 3, 5))
    with pytest.raises(ConfigError, match=r"x is \(0, 3, 64\)"):
        make("none", "layer")(torch.zeros(0, 3, 64))
    with pytest.raises(ConfigError, match="cache keys are"):
        make("none", "layer")(inputs(1, 3), KVPair(*(torch.zeros(2, KV_HEADS, 4, 16) for _ in range(2))))
    for keys, values in ((3, 4), (4, 3)):  # tokens; values of other tokens would be attended to without a word
        sizes = [(1, KV_HEADS, tokens, 16) for tokens in (keys, values)]
        with pytest.raises(ConfigError, match=r"cache values are .* keys and values of as many tokens"):
            make("none", "layer")(inputs(1, 3), KVPair(*map(torch.zeros, sizes)))
    with pytest.raises(ConfigError, match=r"device_bytes is 4096, .* needs at least \d+"):
        make("ssd", "layer", device_bytes=4096)(inputs())
    with pytest.raises(ConfigError, match=r"take \d+ bytes; .*raise them, or offload to ssd"):
        make("cpu", "layer", device_bytes=2 * MIB, host_bytes=2 * MIB)(inputs())
    with pytest.raises(ConfigError, match="device_bytes is 1048576"):
        make("none", "layer", device_bytes=MIB)(inputs())


def test_a_full_disk_is_an_error_and_the_next_call_works(tmp_path: Path) -> None:
    disk = FaultyDisk()
    module = make("ssd", "layer", device_bytes=2 * MIB, host_bytes=2 * MIB, folder=tmp_path, disk=disk)
    disk.fail("write", errno.ENOSPC, nth=2)
    with pytest.raises(SpillError, match="No space left"):
        module(inputs())
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(module(inputs())[0], make("none", "head")(inputs())[0])


@pytest.mark.parametrize(
    ("tokens", "past", "window"), [(1, 0, 0), (100, 0, 0), (33, 5000, 0), (500, 40, 24), (70, 3, 1)]
)
def test_blocks_cover_every_cell_that_is_seen(tokens: int, past: int, window: int) -> None:
    """Scores by blocks equal those of the whole matrix, with the mask of the definition."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = (
        torch.randn(count, 16, generator=generator, dtype=torch.float32) for count in (tokens, past + tokens)
    )
    scoring = Scoring(0.3, softcap=2.0, window=window)
    position, key = torch.arange(past, past + tokens)[:, None], torch.arange(past + tokens)
    seen = (key <= position) & ((key > position - window) if window else True)
    scores = 2.0 * torch.tanh(queries.double() @ keys.double().T * 0.3 / 2.0)
    wanted = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    blocks = cut_rows(tokens, past, window)
    assert [row for block in blocks for row in range(block.first, block.first + block.count)] == list(range(tokens))
    for rows in blocks:
        tile = torch.full((rows.count, rows.width), float("nan"))
        for piece in rows.chunks():
            part = keys[piece.chunk * tiles.CHUNK : (piece.chunk + 1) * tiles.CHUNK]
            tiles.multiply_keys(tile, queries[rows.first : rows.first + rows.count], part, piece)
        tiles.finish_scores(tile, scoring)
        raw = tile.clone()
        tiles.mask(raw, rows, scoring, 0.0)
        tiles.to_probabilities(tile, rows, scoring)
        assert _difference(tile, wanted, rows) < 1e-6
        assert _difference(raw, scores.masked_fill(~seen, 0.0), rows) < 1e-6


def _difference(tile: torch.Tensor, whole: torch.Tensor, rows: Rows) -> float:
    """Between a tile and its part of a matrix; what the tile leaves out must be 0 there."""
    mine = torch.zeros(rows.count, whole.shape[1], dtype=torch.float64)
    mine[:, rows.low : rows.high] = tile[:, : rows.high - rows.low]
    return float((mine - whole[rows.first : rows.first + rows.count]).abs().max())
