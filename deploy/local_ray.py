"""The process behind `tournant serve`: a private Ray on this machine with the service on it.

Owns how such a Ray is started: loopback only, no dashboard, a temporary folder of its own, never joined to a cluster
that happens to run. cli.py starts it as `python -m tournant.deploy.local_ray FD FOLDER` in the environment that Ray
reads; its end is supervisor.py's. It takes a ServeFile as one line of JSON on standard input, which then stays open for
as long as its parent lives, and reports on descriptor FD, one JSON object a line: {"step": text}, {"ready": facts} or
{"failed": message, "code": exit code}.

Invariants:
 1. When standard input ends, the parent is gone: all descendants and the folder go, then this process.
 2. SIGTERM drains: running requests may end, for as long as Serve's graceful_shutdown_timeout_s says. SIGINT does not
    wait for them. After both, engines end before the node store does, and that copies down what is only in RAM.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from tournant.cluster.node_store import STOP_MARGIN_S
from tournant.cluster.node_store_actor import stop_store
from tournant.deploy.app import GRACEFUL_SHUTDOWN_S, bundle_of_rank, make_app
from tournant.deploy.config import ServeFile, ServiceConfig
from tournant.deploy.kv_store_config import memory_limit_bytes
from tournant.deploy.supervisor import become_subreaper, end_descendants
from tournant.workers.device import require_cuda
from tournant.workers.errors import ConfigError, ModelFormatError
from tournant.workers.model_files import resolve_model
from tournant.workers.models.families import read_decoder_config
from tournant.workers.parallel import check_split

RAY_FOLDER = "r"  # short: the names of the sockets below have a limit, see run_folder.py
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours goes through it; Ray's least is 75 MiB
DESCRIBE_TIMEOUT_S = 60.0
ENGINES_END_S = 10.0
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # Serve's own logs; ours come from the replica
_OUR_ERROR = re.compile(r"tournant\.workers\.errors\.(?:ConfigError|ModelFormatError): (.+)")


def start_ray(folder: Path, num_cpus: int) -> None:
    """Ray for this process alone, with everything it writes below `folder`. num_cpus: how many it hands out.

    Ray opens its temporary folder to all users, with the sockets in it (0777). It gets one inside of `folder`, which
    stays as private as it is.

    To be called on the main thread: Ray's processes end with the thread that started them.
    """
    own = folder / RAY_FOLDER
    own.mkdir(mode=0o700)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
        log_to_driver=True,
        _memory=memory_limit_bytes(),  # only the node store asks for any, and it looks itself at what is left
        _temp_dir=str(own),
        _plasma_directory=str(own),
    )


def check_gpus(config: ServiceConfig, num_replicas: int, in_cluster: int) -> None:
    """Raises ConfigError when the replicas need more GPUs than Ray has: it would wait for them without an end."""
    engine = config.engine
    each = engine.num_ranks * int(bundle_of_rank(engine, in_cluster).get("GPU", 0))
    if num_replicas * each > in_cluster:
        ranks = f" (tensor_parallel_size {engine.tensor_parallel_size} x pipeline_parallel_size "
        raise ConfigError(
            f"device is {engine.device!r} and num_replicas is {num_replicas}; each replica takes "
            + ("a GPU" if each == 1 else f"{each} GPUs{ranks}{engine.pipeline_parallel_size})")
            + f" and Ray finds {in_cluster} here; choose fewer replicas{'' if each == 1 else ', a smaller split'} or "
            "device cpu"
        )


def deploy(plan: ServeFile, folder: Path) -> dict[str, Any]:
    """Start Serve and the service on the Ray of this process, wait until it is ready, and return its facts.

    folder: where the node store's socket is put, if there is a store.

    Raises ConfigError or ModelFormatError in the words of the replica that met it, RuntimeError for other failures.
    """
    config = plan.config
    http = {**plan.http_options, "host": config.host, "port": config.port}
    serve.start(proxy_location=plan.proxy_location, http_options=http, logging_config=QUIET)
    options: dict[str, Any] = {"logging_config": QUIET, "max_constructor_retry_count": 1}
    if config.ingress == "direct":  # nothing takes a replica's place here: who ends the service waits so long
        options["graceful_shutdown_timeout_s"] = GRACEFUL_SHUTDOWN_S
    options |= plan.deployment_options
    app = make_app(config, options, str(folder), {"logging_config": QUIET, **plan.ingress_options})
    try:
        handle = serve.run(app, name=plan.name, route_prefix=plan.route_prefix)
    except RuntimeError:
        found = serve.status().applications.get(plan.name)
        told = "\n".join(deployment.message for deployment in found.deployments.values()) if found is not None else ""
        known = _OUR_ERROR.search(told)
        if known is None:
            raise
        raise ConfigError(known[1].strip()) from None
    facts: dict[str, Any] = handle.describe.remote().result(timeout_s=DESCRIBE_TIMEOUT_S)
    return facts


def end(plan: ServeFile, *, wait: bool) -> None:
    """End the engines, then let the node store copy down. wait: let running requests end first."""
    try:
        if wait:
            serve.delete(plan.name)
        else:
            serve.get_app_handle(plan.name).broadcast("end_engine").results(timeout_s=ENGINES_END_S)
        if plan.config.kv_store.nvme_bytes:
            stop_store(plan.name, plan.config.kv_store.drain_s + 2 * STOP_MARGIN_S)
    except (RayError, RayServeException, TimeoutError, RuntimeError):  # what is left ends with this process
        logging.getLogger(__name__).exception("the service did not end in order")


class ServeProcess:
    """The process behind `tournant serve`. It ends by `run` after SIGTERM, else by its parent, or with it."""

    def __init__(self, report_to: int, folder: Path) -> None:
        self._reports = os.fdopen(report_to, "w", buffering=1)
        self._folder = folder
        self._stop = threading.Event()
        self._wait = True  # for running requests
        self._guard = threading.Thread(target=self._end_with_parent, daemon=True, name="guard")

    def run(self) -> None:
        """Serve until SIGTERM. A failure is reported and then waits for the parent, which ends everything."""
        line = sys.stdin.readline()
        self._guard.start()
        try:
            self._serve(ServeFile.model_validate_json(line))
        except (ConfigError, ModelFormatError) as error:
            self._report(failed=str(error), code=2)
            self._guard.join()
        except Exception as error:  # whatever went wrong, the parent has to hear of it
            logging.getLogger(__name__).exception("the service could not be started")
            self._report(failed=f"{type(error).__name__}: {_last_line(str(error))}", code=1)
            self._guard.join()

    def _serve(self, plan: ServeFile) -> None:
        os.chdir(self._folder)  # Ray puts the current folder on its workers' module path
        config = plan.config
        if config.engine.device == "cuda":
            require_cuda()
        self._report(step="preparing the model")
        files = resolve_model(
            config.model, config.weights_dtype, config.cache_path, progress=lambda line: self._report(step=line)
        )
        engine = config.engine
        model = read_decoder_config(files.folder, engine.max_model_len)  # what cannot be is said before Ray starts
        check_split(model, engine.tensor_parallel_size, engine.pipeline_parallel_size)
        self._report(step="starting Ray")
        first, most = plan.replicas
        cpus = int(most * engine.num_ranks * bundle_of_rank(engine, 0)["CPU"])
        start_ray(self._folder, max(os.cpu_count() or 1, cpus + int(plan.ingress_options.get("num_replicas") or 1)))
        if "ray_actor_options" not in plan.deployment_options:
            check_gpus(config, first, int(ray.cluster_resources().get("GPU", 0)))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_end)  # after ray.init, which sets its own
        self._report(step="loading the model into the engine")
        self._report(ready=deploy(plan, self._folder))
        self._stop.wait()
        end(plan, wait=self._wait)

    def _ask_to_end(self, number: int, _frame: FrameType | None) -> None:
        self._wait = number == signal.SIGTERM
        self._stop.set()

    def _report(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone: the guard sees to it
            self._reports.write(json.dumps(message) + "\n")

    def _end_with_parent(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):  # not through a buffer, whose lock would hold up the exit
            pass
        shutil.rmtree(self._folder, ignore_errors=True)  # first: Ray ends this process too once its raylet is gone
        end_descendants()
        os._exit(1)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def main() -> None:
    """Entry point; see the head of this module."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    become_subreaper()
    ServeProcess(int(sys.argv[1]), Path(sys.argv[2])).run()
    os._exit(0)  # the parent ends what is left at once; Ray's own shutdown takes seconds


if __name__ == "__main__":
    main()
