"""All benchmarks, one after another, in one run and one report: `python -m benchmarks.run_all`.

Peers are measured when a venv that has them is named (--vllm-python, --llama-python). A quiet machine is needed: two
threads on two cores wait for each other whenever anything else runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import ModuleType

import torch

from benchmarks import (
    attention,
    beyond_device,
    directory,
    ingress,
    ingress_modes,
    kv_dtypes,
    latency,
    memory,
    offload,
    parallel,
    remote,
    routing,
    routing_engines,
    store,
    store_core,
    store_host,
    throughput,
)
from benchmarks.common import apart, machine, parse_options, print_machine, say, write

HERE = (
    *(throughput, latency, ingress, attention, kv_dtypes, memory, store, store_host, store_core, offload),
    *(beyond_device, routing, routing_engines),
)
ON_RAY = (parallel, directory, remote, ingress_modes)  # each with a Ray of its own, in a process of its own


def main(argv: Sequence[str] | None = None, chosen: Sequence[ModuleType] = (*HERE, *ON_RAY)) -> None:
    """Run everything; files are written at the end of each benchmark, so that a failure leaves what was measured."""
    options = parse_options(__doc__ or "", argv)
    torch.set_num_threads(options.threads)
    facts = machine()
    print_machine(facts)
    reports = []
    for benchmark in chosen:
        start = time.monotonic()
        reports.append(apart(benchmark.run, options) if benchmark in ON_RAY else benchmark.run(options))
        write(reports, facts, options)
        say(f"{reports[-1].title}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
