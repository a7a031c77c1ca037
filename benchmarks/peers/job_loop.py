"""The worker side of a contestant: one JSON job per line on stdin, one JSON answer per line on stdout.

Runs in venvs that know nothing of this project, so it needs the standard library alone. `load(arguments)` gives what
the contestant says of itself and a function that turns prompts (token ids) into new tokens, which alone is timed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts, new tokens of each -> new tokens of each
Load = Callable[[dict[str, Any]], tuple[str, Generate]]

PR_SET_PDEATHSIG = 1


def serve(load: Load) -> None:
    """Load what the first argument (JSON) says, then work until stdin ends.

    A job is {"prompts": [[ids]], "max_new_tokens": n}; with "dtype" it is done by a second instance in that dtype,
    which is dropped afterwards. The answer is {"tokens": [[ids]], "seconds": s}.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it is stopped and cannot see stdin end
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    arguments = json.loads(sys.argv[1])
    facts, generate = load(arguments)
    print(json.dumps({"facts": facts}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        run = generate if "dtype" not in job else load(arguments | {"dtype": job["dtype"]})[1]
        start = time.perf_counter()
        tokens = run(job["prompts"], job["max_new_tokens"])
        seconds = time.perf_counter() - start
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers)
