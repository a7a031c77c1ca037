"""What is wrong with an engine's configuration of its tiers is named, and shown in short."""

from __future__ import annotations

from typing import Any

import pytest

from tournant.workers.errors import ConfigError
from tournant.workers.offload_config import Faults, OffloadConfig

NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"copy_start": -0.1}, r"^copy_start is -0\.1; it must be a number above 0 and at most 1$"),
        ({"copy_stop": NAN}, r"^copy_stop is nan; it must be a number above 0 and at most 1$"),
        ({"copy_parallel": 1.5}, r"^copy_parallel is 1\.5; it must be a number above 0"),
        ({"copy_parallel": True}, r"^copy_parallel is True; it must be a number above 0"),
        ({"copy_start": "0.7"}, r"^copy_start is '0\.7'; it must be a number above 0"),
        ({"copy_start": 0.4}, r"^copy_stop is 0\.5, copy_start 0\.4, copy_parallel 0\.9; they must rise in this order"),
        ({"publish_share": NAN}, r"^publish_share is nan; it must be a number from 0 to 1"),
        ({"lookup_ms": None}, r"^lookup_ms is None; it must be a whole number from 1 to 60000"),
        ({"credit_blocks": 0}, r"^credit_blocks is 0; it must be a whole number from 1 to 8192"),
        ({"restore": "x" * 10_000}, r"^restore is 'x+\.\.\.x+'; it must be one of auto, always, never"),
        ({"num_copiers": [1] * 10_000}, r"^num_copiers is \[1, 1, 1, 1, 1, 1, \.\.\.\]; it must be a whole number"),
    ],
)
def test_a_wrong_value_is_named_and_shortened(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        OffloadConfig("/socket", **fields)
    assert len(str(found.value)) < 200


@pytest.mark.parametrize("value", [-1, NAN, "1", True])
def test_faults_are_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^faults\.save_delay_ms is .*; it must be a number of 0 or more$"):
        Faults(save_delay_ms=value)


def test_what_is_right_goes_over_the_wire_and_back() -> None:
    config = OffloadConfig("/socket", credit_blocks=None, copy_start=1, copy_parallel=1, faults=Faults(1.5))
    plain = {name: getattr(config, name) for name in OffloadConfig.__slots__} | {"faults": {"kernel_delay_ms": 1.5}}
    assert OffloadConfig.from_plain(plain) == config
