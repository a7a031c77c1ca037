"""Attention maps: what transformers and plain matrices give, on all families; 8,192 tokens in bounded memory."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.faulty_disk import FaultyDisk
from tests.helpers.tiny_families import FAMILIES, WINDOW, build_family
from tournant.deploy.llm import LLM
from tournant.workers import attention_maps, map_files
from tournant.workers.attention_maps import MapRequest, write_attention_maps
from tournant.workers.attention_tiles import Scoring, cut_rows, mask
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError, EngineDeadError
from tournant.workers.map_files import KINDS, AttentionMaps
from tournant.workers.model_files import resolve_model
from tournant.workers.model_folder import ModelFiles

EXACT = EngineConfig(device="cpu", dtype="float32", quantization="dequantize")
MIB = 1 << 20


def tokens_of(count: int, vocabulary: int) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.inference_mode()
def reference(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Probabilities [heads, tokens, tokens] of every layer, by transformers' eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    found = model(torch.tensor([token_ids]), output_attentions=True, use_cache=False)
    return [layer[0] for layer in found.attentions]


def files_of(folder: Path, cache: Path) -> ModelFiles:
    return resolve_model(str(folder), "float32", cache)


def difference(maps: AttentionMaps, wanted: list[torch.Tensor], layer: int, heads: range) -> float:
    """The largest of any probability of a layer."""
    return max(
        float(np.abs(maps.open("probabilities", layer, head) - wanted[layer][head].numpy()).max()) for head in heads
    )


def test_all_layers_and_heads_of_m(tiny_model: Path, tmp_path: Path) -> None:
    """512 tokens. Of layer 1 transformers' own float32 is 1e-6 and more away from float64, as its input is."""
    ids, heads = tokens_of(512, 512), range(4)
    files = files_of(tiny_model, tmp_path / "cache")
    maps = write_attention_maps(EXACT, files, MapRequest(ids, [0, 1], list(heads), tmp_path / "maps", KINDS))
    wanted, truth = reference(tiny_model, ids), reference(tiny_model, ids, torch.float64)
    assert difference(maps, wanted, 0, heads) < 1e-6
    assert difference(maps, wanted, 1, heads) < 5e-6
    theirs = max(float((a - b).abs().max()) for a, b in zip(wanted, truth, strict=True))
    assert difference(maps, truth, 1, heads) < 2 * theirs
    below = torch.ones(512, 512).tril().bool()
    for layer in (0, 1):
        for head in heads:
            scores = torch.from_numpy(maps.open("scores", layer, head).copy())
            whole = scores.masked_fill(~below, float("-inf")).softmax(-1)
            assert (whole.numpy() - maps.open("probabilities", layer, head)).__abs__().max() < 1e-6
            assert not scores[~below].any()


def test_maps_are_those_of_the_whole_matrix(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against matrices that are materialised from the queries and keys that the model attends with."""
    seen = []
    real = attention_maps._make

    def note(attending: attention_maps.Attending, *args: object) -> None:
        if not seen or seen[-1] is not attending:
            seen.append(attending)
        real(attending, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_maps, "_make", note)
    files, ids = files_of(tiny_model, tmp_path / "cache"), tokens_of(512, 512)
    maps = write_attention_maps(EXACT, files, MapRequest(ids, [0, 1], [0, 1, 2, 3], tmp_path / "maps", KINDS))
    assert [attending.layer for attending in seen] == [0, 1]
    hidden = torch.ones(512, 512).triu(1).bool()
    for attending in seen:
        scores = attending.queries @ attending.keys.repeat_interleave(2, 0).transpose(1, 2) * 64**-0.5
        whole = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        for head in range(4):
            found = maps.open("scores", attending.layer, head), maps.open("probabilities", attending.layer, head)
            assert np.abs(found[0] - scores[head].masked_fill(hidden, 0).numpy()).max() < 4e-6  # scores reach 12
            assert np.abs(found[1] - whole[head].numpy()).max() < 1e-6


@pytest.mark.parametrize("family", ["mistral", "qwen3", "smollm3", "phi3_partial", "gemma2", "gemma3"])
def test_families(family: str, tmp_path: Path) -> None:
    """Windows, soft caps, norms of heads, partial rotation and layers without it, as the model has them."""
    folder, ids = build_family(FAMILIES[family], tmp_path / "model"), tokens_of(130, 320)
    files = files_of(folder, tmp_path / "cache")
    wanted = reference(folder, ids)
    layers, heads = range(len(wanted)), range(6)
    maps = write_attention_maps(EXACT, files, MapRequest(ids, list(layers), list(heads), tmp_path / "maps"))
    for layer in layers:
        assert difference(maps, wanted, layer, heads) < (1e-6 if layer == 0 else 5e-6)
    windows = json.loads((tmp_path / "maps" / "manifest.json").read_text())["windows"]
    for layer in layers:
        seen = np.count_nonzero(maps.open("probabilities", layer, 0)[-1])
        assert (seen <= WINDOW) == (windows[str(layer)] == WINDOW)


def test_8192_tokens_of_the_default_model_in_48_mib_of_tiles(tmp_path: Path) -> None:
    """A matrix is 256 MiB. The first rows are transformers'; the last ones are the softmax of their scores."""
    files = resolve_model(None, "float32")
    ids = tokens_of(8192, 49000)
    maps = write_attention_maps(EXACT, files, MapRequest(ids, [1], [4], tmp_path / "maps", KINDS))
    assert maps.peak_bytes <= 64 * MIB
    scores, found = maps.open("scores", 1, 4), maps.open("probabilities", 1, 4)
    assert found.shape == scores.shape == (8192, 8192)
    wanted = reference(files.folder, ids[:200])[1][4].numpy()
    assert np.abs(found[:200, :200] - wanted).max() < 5e-6
    for row in (200, 4095, 4096, 8190, 8191):
        whole = torch.from_numpy(scores[row, : row + 1].copy()).softmax(-1).numpy()
        assert np.abs(found[row, : row + 1] - whole).max() < 1e-6
        assert not found[row, row + 1 :].any()
    on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "maps").glob("*.npy"))
    assert on_disk <= 2 * map_files.bytes_on_disk(8192) < 400 * MIB


def test_llm(tiny_model: Path, tmp_path: Path) -> None:
    """Texts and token ids, as the command line; errors leave the folder as it was."""
    cache, ids = tmp_path / "cache", list(b"To be, or not to be")
    direct = write_attention_maps(
        EXACT, files_of(tiny_model, cache), MapRequest(ids, [1], [2], tmp_path / "direct")
    ).open("probabilities", 1, 2)
    steps: list[tuple[str, int, int]] = []
    with LLM(str(tiny_model), cache_dir=str(cache), dtype="float32") as llm:
        for place, prompt in enumerate(("To be, or not to be", ids)):
            maps = llm.attention_maps(
                prompt, [1], [2], tmp_path / str(place), progress=lambda *step: steps.append(step)
            )
            assert np.array_equal(maps.open("probabilities", 1, 2), direct)
        assert ("layers", 2, 2) in steps
        assert steps[-1] == ("rows", 19, 19)
        with pytest.raises(ConfigError, match="heads are \\[4\\]; this model has 0 to 3"):
            llm.attention_maps("a", [0], [4], tmp_path / "new")
        with pytest.raises(ConfigError, match="layers is 1; it must be a list of numbers"):
            llm.attention_maps("a", 1, [0], tmp_path / "new")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="layers are \\[0, 0\\]"):
            llm.attention_maps("a", [0, 0], [0], tmp_path / "new")
        with pytest.raises(ConfigError, match="holds attention maps"):
            llm.attention_maps("a", [0], [0], tmp_path / "0")
        with pytest.raises(ConfigError, match="2049 tokens; this model takes 1 to 2048"):
            llm.attention_maps([5] * 2049, [0], [0], tmp_path / "new")
        assert not (tmp_path / "new").exists()
        assert np.array_equal(np.load(tmp_path / "0" / "probabilities-layer-001-head-002.npy"), direct)
        assert llm.attention_maps("a", [0], [0], tmp_path / "0", overwrite=True).num_tokens == 1
    with pytest.raises(EngineDeadError, match="closed"):
        llm.attention_maps("a", [0], [0], tmp_path / "new")


@pytest.fixture
def request_of_m(tmp_path: Path) -> MapRequest:
    return MapRequest(tokens_of(200, 512), [0], [0, 1], tmp_path / "maps", KINDS)


def test_a_disk_that_fills_up_is_an_error_and_nothing_is_left(
    tiny_model: Path, tmp_path: Path, request_of_m: MapRequest
) -> None:
    files, disk = files_of(tiny_model, tmp_path / "cache"), FaultyDisk()
    disk.fail("write", errno.ENOSPC, nth=300, forever=True)
    with pytest.raises(
        OSError, match=r"cannot be written to .*maps: No space left on device; free some room"
    ) as raised:
        write_attention_maps(EXACT, files, request_of_m, disk=disk)
    assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / "maps").exists()
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "notes.txt").write_text("of somebody")
    with pytest.raises(OSError, match="No space left"):
        write_attention_maps(EXACT, files, request_of_m, disk=disk)
    assert os.listdir(tmp_path / "maps") == ["notes.txt"]


def test_folders_that_were_made_on_the_way_go_too(tiny_model: Path, tmp_path: Path) -> None:
    files, disk = files_of(tiny_model, tmp_path / "cache"), FaultyDisk()
    disk.fail("write", errno.ENOSPC, nth=3, forever=True)
    with pytest.raises(OSError, match="No space left"):
        write_attention_maps(EXACT, files, MapRequest([1] * 9, [0], [0], tmp_path / "a" / "b" / "maps"), disk=disk)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_of_something_else_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "an extension of a browser"}')
    (tmp_path / "scores-layer-000-head-000.npy").write_text("of a run that was killed")
    with pytest.raises(ConfigError, match=r"manifest.json is none of attention maps and would be lost"):
        map_files.MapFolder(tmp_path, [], 1, overwrite=overwrite)
    assert len(os.listdir(tmp_path)) == 2


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="link is no folder; name one"):
        map_files.MapFolder(tmp_path / "link", [], 1)


def test_short_writes_are_carried_on(tiny_model: Path, tmp_path: Path, request_of_m: MapRequest) -> None:
    files, disk = files_of(tiny_model, tmp_path / "cache"), FaultyDisk()
    disk.short("write", 10, nth=20)
    disk.short("write", 100, nth=200)
    maps = write_attention_maps(EXACT, files, request_of_m, disk=disk)
    for head in (0, 1):
        assert np.allclose(maps.open("probabilities", 0, head).sum(1), 1, atol=1e-6)
    disk.short("write", 0, nth=100)
    with pytest.raises(OSError, match="stopped without an error"):
        write_attention_maps(EXACT, files, MapRequest([1] * 200, [0], [0], tmp_path / "other"), disk=disk)
    assert not (tmp_path / "other").exists()


def test_stopped_half_way_nothing_is_left(tiny_model: Path, tmp_path: Path, request_of_m: MapRequest) -> None:
    def stop(what: str, done: int, _total: int) -> None:
        if what == "rows" and done > 100:
            raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        write_attention_maps(EXACT, files_of(tiny_model, tmp_path / "cache"), request_of_m, progress=stop)
    assert not (tmp_path / "maps").exists()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the checkpoint's own, until it is collected


def test_room_is_looked_for_first(
    tiny_model: Path, tmp_path: Path, request_of_m: MapRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 4 * map_files.bytes_on_disk(200)
    monkeypatch.setattr(map_files.os, "statvfs", lambda _: SimpleNamespace(f_bavail=needed - 1, f_frsize=1))
    with pytest.raises(OSError, match=f"take {needed} bytes, but .* has room for {needed - 1}; choose fewer"):
        write_attention_maps(EXACT, files_of(tiny_model, tmp_path / "cache"), request_of_m)
    assert not (tmp_path / "maps").exists()


def test_what_a_killed_run_left_is_said_and_can_be_overwritten(
    tiny_model: Path, tmp_path: Path, request_of_m: MapRequest
) -> None:
    files = files_of(tiny_model, tmp_path / "cache")
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "scores-layer-007-head-001.npy").touch()
    with pytest.raises(ConfigError, match=r"without manifest.json, as a run that was killed leaves"):
        write_attention_maps(EXACT, files, request_of_m)
    again = MapRequest(**{name: getattr(request_of_m, name) for name in request_of_m.__slots__} | {"overwrite": True})
    write_attention_maps(EXACT, files, again)
    assert len(os.listdir(tmp_path / "maps")) == 5
    with pytest.raises(ConfigError, match="is no folder"):
        write_attention_maps(EXACT, files, MapRequest([1], [0], [0], tmp_path / "maps" / "manifest.json"))


def test_a_mask_covers_padding() -> None:
    (rows,) = cut_rows(5, 0)
    tile = torch.full((5, rows.width), float("nan"))
    mask(tile, rows, Scoring(1.0), 0.0)
    assert torch.equal(tile.isnan(), torch.ones(5, 16).tril().bool())
