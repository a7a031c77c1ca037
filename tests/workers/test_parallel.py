"""Splits: their arithmetic, what each rank reads, and greedy tokens equal to one process's in fp32.

Prompts are without near ties, see `parallel_harness.without_near_ties`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.family_gguf import write_family_gguf
from tests.helpers.tiny_families import FAMILIES, build_family
from tests.helpers.tiny_model import build_tiny_model
from tests.workers.harness import Session, files_of, make_engine
from tests.workers.parallel_harness import NUM_NEW, Ranks, Replica, prompts_of, replica, without_near_ties
from tournant.kvstore.block import Part
from tournant.workers.errors import ConfigError
from tournant.workers.model_files import resolve_model
from tournant.workers.models.decoder_config import DecoderConfig, LayerKind
from tournant.workers.models.families import read_decoder_config
from tournant.workers.parallel import (
    Shard,
    ShardTensors,
    check_split,
    keeps_groups,
    possible_tensor_sizes,
    shard_of,
    shards_of,
)
from tournant.workers.split import Split
from tournant.workers.weights import load_checkpoint

LENGTHS = (1, 5, 16, 33, 100, 255)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    found.start(3)
    yield found
    found.close()


def config_of(heads: int, kv_heads: int, layers: int = 2, inner: int = 64, vocab: int = 512) -> DecoderConfig:
    return DecoderConfig(
        num_layers=layers,
        hidden_size=64,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=16,
        intermediate_size=inner,
        vocab_size=vocab,
        max_positions=128,
        max_model_len=128,
        rms_eps=1e-5,
        tied_embeddings=False,
        eos_token_ids=(),
        ropes=(),
        layers=(LayerKind(),) * layers,
        attention_scale=1.0,
    )


@st.composite
def configs_and_splits(draw: st.DrawFn) -> tuple[DecoderConfig, Split]:
    kv_heads = draw(st.integers(1, 8))
    config = config_of(
        kv_heads * draw(st.integers(1, 8)),
        kv_heads,
        draw(st.integers(1, 9)),
        draw(st.integers(64, 400)),
        draw(st.integers(64, 1000)),
    )
    tensor = draw(st.sampled_from(possible_tensor_sizes(config)))
    return config, check_split(config, tensor, draw(st.integers(1, len(config.layers))))


def tiles(ranges: list[range], total: int) -> bool:
    return [item for part in ranges for item in part] == list(range(total))


# ---------------------------------------------------------------- arithmetic


@given(configs_and_splits())
def test_parts_tile_the_whole(drawn: tuple[DecoderConfig, Split]) -> None:
    config, split = drawn
    shards = list(shards_of(config, split))
    assert tiles([shards[split.ranks_of(stage)[0]].layers for stage in range(split.pipeline)], len(config.layers))
    for stage in range(split.pipeline):
        mine = [shards[rank] for rank in split.ranks_of(stage)]
        assert len({shard.layers for shard in mine}) == 1
        assert len(mine[0].layers) >= 1
        assert tiles([shard.heads for shard in mine], config.num_heads)
        assert tiles([shard.inner for shard in mine], config.intermediate_size)
        assert tiles([shard.vocab for shard in mine], config.vocab_size)
        assert tiles([shard.kv_heads for shard in mine if shard.owns_kv], config.num_kv_heads)
        owners = [shard.part for shard in mine if shard.owns_kv]
        assert len(set(owners)) == len(owners)
        for place, shard in enumerate(mine):
            group = config.num_heads // config.num_kv_heads
            assert {head // group for head in shard.heads} == set(shard.kv_heads)
            assert len(shard.heads) % len(shard.kv_heads) == 0
            assert shard.part in owners
            assert len(shard.vocab) <= shard.vocab_share
            assert all(token // shard.vocab_share == place for token in shard.vocab)
            assert shard.config.begins == (stage == 0)
            assert shard.config.ends == (stage == split.pipeline - 1)


def holders(config: DecoderConfig, split: Split, name: str, shape: tuple[int, ...], axis: int = 0) -> Counter[int]:
    """How many ranks of a stage hold each row (or column) of a tensor."""
    found: Counter[int] = Counter()
    for rank in split.ranks_of(0):
        whole, cut = shard_of(config, split, rank).cut(name, shape)
        assert whole == shape
        if cut is None:
            found.update(range(shape[axis]))
        elif axis == 0:
            found.update(row for part in cut.rows for row in part)
        else:
            assert cut.rows == (range(shape[0]),)
            found.update(cut.columns or ())
    return found


@given(configs_and_splits())
def test_every_weight_is_where_it_is_needed(drawn: tuple[DecoderConfig, Split]) -> None:
    """Each row or column of a split matrix once, of KV once per rank that has the head, everything else everywhere."""
    config, split = drawn
    tensor, hidden, inner, size = split.tensor, config.hidden_size, config.intermediate_size, config.head_size
    q, kv = config.num_heads * size, config.num_kv_heads * size
    copies = max(1, tensor // config.num_kv_heads)
    layer = "model.layers.0."
    for name, rows, times in (
        ("self_attn.q_proj", q, [1] * q),
        ("self_attn.k_proj", kv, [copies] * kv),
        ("self_attn.v_proj", kv, [copies] * kv),
        ("self_attn.qkv_proj", q + 2 * kv, [1] * q + [copies] * (2 * kv)),
        ("mlp.gate_proj", inner, [1] * inner),
        ("mlp.up_proj", inner, [1] * inner),
        ("mlp.gate_up_proj", 2 * inner, [1] * (2 * inner)),
    ):
        for shape, kind in (((rows, hidden), "weight"), ((rows,), "bias")):
            assert holders(config, split, f"{layer}{name}.{kind}", shape) == dict(enumerate(times))
    for name, columns in (("self_attn.o_proj", q), ("mlp.down_proj", inner)):
        assert holders(config, split, f"{layer}{name}.weight", (hidden, columns), axis=1) == dict.fromkeys(
            range(columns), 1
        )
        assert holders(config, split, f"{layer}{name}.bias", (hidden,)) == dict.fromkeys(range(hidden), 1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert holders(config, split, name, (config.vocab_size, hidden)) == dict.fromkeys(range(config.vocab_size), 1)
    norm = holders(config, split, f"{layer}input_layernorm.weight", (hidden,))
    assert norm == dict.fromkeys(range(hidden), tensor)


def test_kv_of_more_ranks_than_heads() -> None:
    shards = list(shards_of(config_of(4, 2, layers=3), Split(4, 2)))
    assert [shard.owns_kv for shard in shards] == [True, False] * 4
    assert [shard.part for shard in shards[:4]] == [Part(0, 1, 0, 1)] * 2 + [Part(0, 1, 1, 2)] * 2
    assert [shard.part for shard in shards[4:]] == [Part(1, 3, 0, 1)] * 2 + [Part(1, 3, 1, 2)] * 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "possible"),
    [(9, 3, [1, 3, 9]), (4, 2, [1, 2, 4]), (12, 6, [1, 2, 3, 6, 12]), (5, 1, [1, 5]), (32, 8, [1, 2, 4, 8, 16, 32])],
)
def test_possible_sizes(heads: int, kv_heads: int, possible: list[int]) -> None:
    config = config_of(heads, kv_heads)
    assert possible_tensor_sizes(config) == possible
    for size in range(heads + 2):
        if size in possible:
            assert check_split(config, size, 1).tensor == size
        else:
            with pytest.raises(ConfigError, match=f"is {size}, .* possible are {', '.join(map(str, possible))}$"):
                check_split(config, size, 1)
    for stages in (0, 3, True):
        with pytest.raises(ConfigError, match="the model has 2 layers; possible are 1 to 2"):
            check_split(config, 1, stages)


def test_refused_from_the_configuration_alone(tiny_model: Path, tmp_path: Path) -> None:
    """With no weights in the folder."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3"):
        check_split(read_decoder_config(tmp_path), 3, 1)


# ---------------------------------------------------------------- weights


def tensors_of(folder: Path, shard: Shard) -> ShardTensors:
    return ShardTensors(load_checkpoint(folder), shard)


def test_ranks_read_their_parts(tmp_path: Path) -> None:
    """Joined again they are the whole; padding is zero; only rank 0 adds the bias of a sum."""
    folder = build_tiny_model(tmp_path, attention_bias=True, mlp_bias=True, vocab_size=500)
    config = read_decoder_config(folder)
    whole = load_checkpoint(folder)
    shards = list(shards_of(config, check_split(config, 4, 1)))

    def parts(name: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
        return [tensors_of(folder, shard).take(name, shape, torch.float32) for shard in shards]

    prefix = "model.layers.1."
    q = whole.take(prefix + "self_attn.q_proj.weight", (256, 128), torch.float32)
    assert torch.equal(torch.cat(parts(prefix + "self_attn.q_proj.weight", (64, 128))), q)
    k = whole.take(prefix + "self_attn.k_proj.weight", (128, 128), torch.float32)
    found = parts(prefix + "self_attn.k_proj.weight", (64, 128))
    assert torch.equal(torch.cat(found[::2]), k)
    assert torch.equal(torch.cat(found[1::2]), k)
    down = whole.take(prefix + "mlp.down_proj.weight", (128, 256), torch.float32)
    assert torch.equal(torch.cat(parts(prefix + "mlp.down_proj.weight", (128, 64)), dim=1), down)
    bias = whole.take(prefix + "self_attn.o_proj.bias", (128,), torch.float32)
    first, *others = parts(prefix + "self_attn.o_proj.bias", (128,))
    assert torch.equal(first, bias)
    assert not torch.cat(others).any()
    table = torch.cat(parts("model.embed_tokens.weight", (500, 128)))
    assert torch.equal(table[:500], whole.take("model.embed_tokens.weight", (500, 128), torch.float32))
    assert table.shape == (512, 128)
    assert not table[500:].any()


def test_a_stage_reads_its_layers_alone(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, num_layers=3)
    config = read_decoder_config(folder)
    first, second = shards_of(config, check_split(config, 1, 2))
    assert [shard.layers for shard in (first, second)] == [range(1), range(1, 3)]
    left = tensors_of(folder, first).unused()
    assert left
    assert all(name.startswith("model.layers.0.") for name in left), "what other stages take is not unused"
    assert first.layout(16, torch.float32).layout_id == second.layout(16, torch.float32).layout_id


@pytest.mark.parametrize(("tensor", "keeps"), [(1, True), (2, True), (4, False)])
def test_quantised_groups_stay_whole_or_are_dequantised(tmp_path: Path, tensor: int, keeps: bool) -> None:
    """Four heads of 16: two ranks have 32 columns of o each, four have half a group."""
    model = build_tiny_model(tmp_path / "m", head_size=16, intermediate=128)
    write_family_gguf(tmp_path / "m.gguf", model, Kind.Q4_0)
    folder = resolve_model(str(tmp_path / "m.gguf"), "float32", tmp_path).folder
    config = read_decoder_config(folder)
    split = check_split(config, tensor, 1)
    assert keeps_groups(config, split) == keeps
    name, rows = "model.layers.0.self_attn.o_proj.weight", []
    for shard in shards_of(config, split):
        tensors = tensors_of(folder, shard)
        assert tensors.has_quantized == keeps
        found = tensors.take_quantized(name, (128, len(shard.heads) * 16))
        assert (found is not None) == keeps
        rows += [] if found is None else [found[1]]
    if keeps:
        whole = load_checkpoint(folder).take_quantized(name, (128, 64))
        assert whole is not None
        assert torch.equal(torch.cat(rows, dim=1), whole[1])


# ---------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def models(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("split")
    smol = {"num_heads": 9, "num_kv_heads": 3, "head_size": 16, "hidden": 144, "intermediate": 192, "tie": True}
    return {
        **tiny_models,
        "smol": build_tiny_model(root / "smol", **smol),
        "deep": build_tiny_model(root / "deep", num_layers=4),
        "biased": build_tiny_model(root / "biased", attention_bias=True, mlp_bias=True),
        **{name: build_family(FAMILIES[name], root / name) for name in ("phi3", "gemma3", "qwen3")},
    }


@pytest.mark.parametrize(
    ("model", "tensor", "pipeline", "deterministic"),
    [
        *[
            ("m", *split, deterministic)
            for split in ((2, 1), (4, 1), (1, 2), (2, 2))
            for deterministic in (True, False)
        ],
        ("smol", 3, 1, True),
        ("tied", 3, 1, False),
        ("tied", 1, 3, True),
        ("biased", 4, 1, False),
        ("deep", 1, 4, True),
        ("phi3", 2, 2, False),
        ("gemma3", 2, 2, True),
        ("qwen3", 2, 1, False),
    ],
)
def test_tokens_equal_one_process(
    ranks: Ranks, models: Mapping[str, Path], model: str, tensor: int, pipeline: int, deterministic: bool
) -> None:
    """Together and cold, then from the prefix cache, then alone and in chunks."""
    chosen = without_near_ties(models[model], LENGTHS if model in ("m", "deep", "smol") else LENGTHS[1::2])
    prompts, want = chosen.prompts, chosen.answers
    with replica(ranks, models[model], tensor, pipeline, deterministic=deterministic, num_blocks=100) as session:
        assert session.ask(prompts, max_tokens=NUM_NEW) == want
        assert session.ask(prompts, max_tokens=NUM_NEW) == want
    with replica(ranks, models[model], tensor, pipeline, deterministic=deterministic, max_num_batched_tokens=16) as s:
        assert s.ask(prompts[-1:], max_tokens=NUM_NEW) == want[-1:]


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (1, 2), (2, 2)])
def test_deterministic_bits_do_not_depend_on_mates_and_chunks(
    ranks: Ranks, models: Mapping[str, Path], tensor: int, pipeline: int
) -> None:
    """Log-probabilities to the last bit, and drawn tokens, alone, among others, and in other chunks."""
    prompts = prompts_of((70, 5, 130), seed=2)
    wanted = {"logprobs": 3, "prompt_logprobs": 1, "temperature": 1.0, "seed": 3, "max_tokens": 8}

    def ask(session: Session, asked: list[list[int]]) -> list[object]:
        ids = [session.submit(prompt, **wanted) for prompt in asked]
        session.drain()
        return [
            [(out.token_ids, out.logprobs, out.prompt_logprobs) for out in session.outputs[request]] for request in ids
        ]

    with replica(ranks, models["deep"], tensor, pipeline) as session:
        together = ask(session, prompts)
        alone = [ask(session, [prompt])[0] for prompt in prompts]
    with replica(ranks, models["deep"], tensor, pipeline, max_num_batched_tokens=32) as session:
        chunked = ask(session, prompts)
    assert alone == together
    assert chunked == together
    if tensor == 1:
        assert ask(Session(make_engine(models["deep"], num_blocks=200)), prompts) == together, "stages change no bit"


def test_a_split_of_heads_has_keys_of_its_own(ranks: Ranks, models: Mapping[str, Path]) -> None:
    """Sums over other ranks have other bits; stages change none, and share keys with a single process."""
    single = make_engine(models["m"]).info.namespace
    found = {}
    for tensor, pipeline in ((2, 1), (4, 1), (1, 2)):
        running = Replica(ranks, models["m"], tensor, pipeline)
        found[tensor] = running.engine.info.namespace
        assert running.close() == [""] * (tensor * pipeline - 1)
    assert found[1] == single
    assert len({namespace.digest() for namespace in found.values()}) == 3
    assert replace(found[2], numerics=single.numerics) == single


def test_pools_have_the_blocks_that_fit_every_rank(ranks: Ranks, models: Mapping[str, Path]) -> None:
    """Of three layers, stage 0 has one and stage 1 two: in the same bytes, half as many blocks fit there."""
    running = Replica(ranks, models["tied"], 1, 2, num_blocks=60)
    num_blocks, fitting = running.shard.cache.num_blocks, running.shard.config.kv_cache_bytes or 0
    assert running.close() == [""]
    assert running.shard.layout.num_blocks_for(fitting) == 180
    assert num_blocks == 90


def test_native_quantised_matrices(ranks: Ranks, tmp_path: Path) -> None:
    """Multiplied as they are by two ranks, as close to exact as in one process; refused where groups are cut."""
    model = build_tiny_model(tmp_path / "m", head_size=16, intermediate=128)
    write_family_gguf(tmp_path / "m.gguf", model, Kind.Q8_0)
    folder = resolve_model(str(tmp_path / "m.gguf"), "float32", tmp_path).folder
    assert files_of(folder).folder == folder
    prompts = prompts_of((40,), seed=5)
    fields = {"quantization": "native", "deterministic": True}

    def logprobs(session: Session) -> list[float]:
        request = session.submit(prompts[0], prompt_logprobs=0, max_tokens=1)
        session.drain()
        entries = session.outputs[request][0].prompt_logprobs or []
        return [entry.logprob for entry in entries if entry is not None]

    exact = torch.tensor(logprobs(Session(make_engine(folder, **fields | {"quantization": "dequantize"}))))
    single = torch.tensor(logprobs(Session(make_engine(folder, **fields))))
    with replica(ranks, folder, 2, 1, **fields) as session:
        found = torch.tensor(logprobs(session))
    assert not torch.equal(found, exact)
    assert (found - exact).square().mean() < 1.5 * (single - exact).square().mean()
    with pytest.raises(ConfigError, match="quantization is 'native'"):
        Replica(ranks, folder, 4, 1, **fields)
