"""A rank in a process of its own, told over a pipe which groups to join.

One JSON message per group in, one per group out: how it ended. The process ends with the pipe.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import tests.helpers.triton_interpreter  # noqa: F401 - before torch._dynamo imports triton, see there
from tests.workers.harness import files_of
from tournant.kvstore.errors import InvariantViolation
from tournant.workers.config import EngineConfig
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.models.families import describe
from tournant.workers.parallel_runner import RankServer, ShardRunner
from tournant.workers.rank_group import Membership, RankGroup, RankLost, find_store
from tournant.workers.split import Split


def follow(order: dict[str, Any]) -> str:
    """Serve one group until it ends; "" or what went wrong."""
    plain = order["member"]
    changes = {"split": Split(**plain["split"]), "token": bytes.fromhex(plain["token"])}
    member = Membership(**plain | changes)
    config, files = EngineConfig(**order["config"]), files_of(Path(order["folder"]))
    group = None
    try:
        store = find_store("127.0.0.1", order["port"], timeout_s=member.timeout_s)
        weights_id = bytes.fromhex(order["weights_id"]) or files.weights_id
        group = RankGroup(member, store, weights_id, ordered=config.deterministic)
        shard = ShardRunner(config, describe(files, config), group)
        RankServer(shard).serve()
    except (RankLost, ConfigError, ModelFormatError, InvariantViolation) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if group is not None:
            group.close()
    return ""


def work(pipe: Connection) -> None:
    """Entry point of the process."""
    torch.set_num_threads(1)
    while True:
        try:
            order = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(json.dumps(follow(order)).encode())
