"""Watch replicas come with load, and requests go on meanwhile.

Needs the service with an autoscaling file: `serve deploy deploy/configs/autoscaling.yaml`. Sends prompts until enough
replicas run; `serve status` shows how they go again, some minutes later.
"""

from __future__ import annotations

import argparse
import itertools

from ray import serve

from tournant.deploy.client import connect

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--app", default="tournant", help="the application's name")
parser.add_argument("--address", help="of the cluster, as Ray's; found by Ray, if left out")
parser.add_argument("--replicas", type=int, default=2, help="end when so many run")
parser.add_argument("--in-flight", type=int, default=64, help="requests at once")
args = parser.parse_args()


def num_running() -> int:
    """Replicas that take requests."""
    states = serve.status().applications[args.app].deployments["Replica"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


client = connect(args.app, args.address)
prompts = (f"Tell me something about the number {number}." for number in itertools.count())
seen = answered = failed = 0
for outcome in client.batch(prompts, max_in_flight=args.in_flight, max_tokens=200):
    answered += outcome.error is None
    failed += outcome.error is not None
    if outcome.number % args.in_flight == 0 and (running := num_running()) != seen:
        seen = running
        print(f"{answered} answered, {failed} failed, replicas: {running}", flush=True)
        if running >= args.replicas:
            break
