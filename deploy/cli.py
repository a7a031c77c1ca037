"""The command line: `tournant serve`, `chat`, `attention`, `config`, `weights`, `keys`, `kv` and `version`.

Owns flags, what is printed, exit codes and the environment that Ray is given; it is the only place that looks at
environment variables. It stays light: Ray and the model live in the process of local_ray.py, which `serve` watches over
and ends with everything below it (supervisor.py).

Exit codes: 0 ended as asked, 1 failure, 2 wrong configuration or model.
"""

from __future__ import annotations

import json
import os
import readline  # noqa: F401 - gives the prompt of `tournant chat` line editing
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from importlib.metadata import version as package_version
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tournant.cluster.node_store import STOP_MARGIN_S
from tournant.cluster.run_folder import RunFolder
from tournant.deploy.access import Access
from tournant.deploy.access_config import AccessConfig
from tournant.deploy.attention_cli import attention_command
from tournant.deploy.chat import ChatError, run_chat
from tournant.deploy.config import ServeFile, load_config_file, parse_config
from tournant.deploy.config_cli import config_app
from tournant.deploy.http_client import DEFAULT_URL, CAFile, KeyFile, open_client
from tournant.deploy.keys_cli import keys_app
from tournant.deploy.kv_cli import kv_app, show_bytes
from tournant.deploy.kv_store_config import KV_STORE_KEYS, absolute_folder
from tournant.deploy.supervisor import become_subreaper, check_port, end_descendants
from tournant.deploy.tls import check_tls
from tournant.deploy.weights_cli import weights_app
from tournant.kvstore.config import PAGE_BYTES
from tournant.workers.config import DEVICES, DTYPES, KV_CACHE_DTYPES
from tournant.workers.errors import ConfigError

EARLY_LOG_LINES = 200
LOG_JOIN_S = 2.0
FOUND_AT_START = (("adopted", "adopted"), ("refused", "refused_records"), ("corrupt", "corrupt_records"))
DRAIN_S = 15.0  # after SIGTERM: the replica's graceful shutdown and Serve's own ends
QUESTION = "What is the capital of Germany?"  # its answer is no near tie for the default model
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray runs whatever it is sent: only holders of a secret of this run may send
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every platform: Ray listens on loopback only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
}
RAY_ADDRESSES = ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_NAMESPACE")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve a language model on Ray, and talk to it.",
)
app.command("attention")(attention_command)
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
app.add_typer(kv_app, name="kv")
app.add_typer(weights_app, name="weights")


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(package_version("tournant"))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model to talk to; the first one listed if left out.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 = always the most probable token.")] = 0.6,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 1000,
    key_file: KeyFile = None,
    ca_file: CAFile = None,
) -> None:
    """Chat in the terminal with a running server. Ctrl-C stops an answer, /exit ends."""

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        with open_client(url, None, key_file, ca_file) as client:
            run_chat(client, model, system, {"temperature": temperature, "max_tokens": max_tokens}, input, show)
    except ChatError as error:
        _fail(str(error), 1)
    except ConfigError as error:
        _fail(str(error), 2)


Flag = typer.Option
ENGINE, SERVICE, STORE, ACCESS = "Engine", "Service", "KV store", "Access"
TLS_FLAGS = ("ssl_certfile", "ssl_keyfile")  # of Serve's http_options
PrefixCaching = Annotated[
    bool | None,
    Flag(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        rich_help_panel=ENGINE,
        help="Reuse the KV of prompts that begin alike \\[on].",
    ),
]
KVCacheDtype = Annotated[
    str | None, Flag(rich_help_panel=STORE, help=f"KV on the device: {', '.join(KV_CACHE_DTYPES)}.")
]
HostBytes = Annotated[
    str | None,
    Flag(
        rich_help_panel=STORE, help="RAM for KV that leaves the device, such as 4GiB \\[0; with a GPU 25 % of memory]."
    ),
]
NvmeBytes = Annotated[str | None, Flag(rich_help_panel=STORE, help="Most bytes in --nvme-folder \\[0 = none].")]
APIKeysFile = Annotated[str | None, Flag(rich_help_panel=ACCESS, help="Tenants and their keys \\[no key is needed].")]
AdminPort = Annotated[
    int | None, Flag(rich_help_panel=ACCESS, help="Port for operators' routes \\[beside the API, from this machine].")
]
AdminKeyFile = Annotated[str | None, Flag(rich_help_panel=ACCESS, help="The key that operators need at --admin-port.")]
SSLCertfile = Annotated[str | None, Flag(rich_help_panel=ACCESS, help="Certificate (PEM): HTTPS instead of HTTP.")]
SSLKeyfile = Annotated[str | None, Flag(rich_help_panel=ACCESS, help="Its key (PEM).")]
NvmeFolder = Annotated[str | None, Flag(rich_help_panel=STORE, help="Where KV is kept on disk, between runs too.")]


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder with config.json and safetensors, a .gguf file, or a hub id; default SmolLM2-135M-Instruct.",
        ),
    ] = None,
    config: Annotated[Path | None, Flag(help="Serve file (YAML); flags go before what it says.")] = None,
    host: Annotated[str | None, Flag(rich_help_panel=SERVICE, help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, Flag(rich_help_panel=SERVICE, help="Port to listen on [8000].")] = None,
    served_model_name: Annotated[str | None, Flag(rich_help_panel=SERVICE, help="What clients call the model.")] = None,
    num_replicas: Annotated[int | None, Flag(rich_help_panel=SERVICE, help="Engines that share requests [1].")] = None,
    request_timeout_s: Annotated[float | None, Flag(rich_help_panel=SERVICE, help="Longest request [600].")] = None,
    max_body_bytes: Annotated[str | None, Flag(rich_help_panel=SERVICE, help="Largest request body [8MiB].")] = None,
    ingress: Annotated[str | None, Flag(rich_help_panel=SERVICE, help="Way in: direct or resilient.")] = None,
    log_level: Annotated[str | None, Flag(rich_help_panel=SERVICE, help="debug, info, warning or error.")] = None,
    cache_dir: Annotated[str | None, Flag(rich_help_panel=SERVICE, help="Where converted models are kept.")] = None,
    device: Annotated[str | None, Flag(rich_help_panel=ENGINE, help=f"{', '.join(DEVICES)}.")] = None,
    dtype: Annotated[str | None, Flag(rich_help_panel=ENGINE, help=f"{', '.join(DTYPES)}.")] = None,
    tensor_parallel_size: Annotated[
        int | None, Flag(rich_help_panel=ENGINE, help="Processes, or GPUs, that share every layer [1].")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, Flag(rich_help_panel=ENGINE, help="Stages of layers, one after another [1].")
    ] = None,
    max_model_len: Annotated[
        int | None, Flag(rich_help_panel=ENGINE, help="Most tokens of prompt and answer \\[the model's limit].")
    ] = None,
    max_num_seqs: Annotated[int | None, Flag(rich_help_panel=ENGINE, help="Sequences that run at once [64].")] = None,
    max_queued_requests: Annotated[
        int | None, Flag(rich_help_panel=ENGINE, help="Requests that may wait; more get 503 [1024].")
    ] = None,
    kv_cache_bytes: Annotated[
        str | None, Flag(rich_help_panel=ENGINE, help="Size of the KV pool, such as 512MiB \\[by memory].")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, Flag(rich_help_panel=ENGINE, help="Share of a GPU's memory for weights, steps and KV [0.9].")
    ] = None,
    enable_prefix_caching: PrefixCaching = None,
    deterministic: Annotated[
        bool | None,
        Flag(
            "--deterministic/--no-deterministic",
            rich_help_panel=ENGINE,
            help="Same tokens whatever else runs, a little slower \\[off].",
        ),
    ] = None,
    kv_cache_dtype: KVCacheDtype = None,
    host_bytes: HostBytes = None,
    nvme_bytes: NvmeBytes = None,
    nvme_folder: NvmeFolder = None,
    api_keys_file: APIKeysFile = None,
    admin_port: AdminPort = None,
    admin_key_file: AdminKeyFile = None,
    ssl_certfile: SSLCertfile = None,
    ssl_keyfile: SSLKeyfile = None,
) -> None:
    """Serve a model behind an OpenAI-compatible endpoint, on a private Ray that ends with this command."""
    chosen = {name: value for name, value in locals().items() if value is not None and name != "config"}
    try:
        plan = make_plan(config, chosen)
        check_plan(plan)
        code = ServiceRun(plan).run()
    except ConfigError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"the service cannot be started: {error}", 1)
    raise typer.Exit(code)


def make_plan(config_file: Path | None, flags: dict[str, Any]) -> ServeFile:
    """What to serve: the file, if any, and flags over it. Paths become absolute. Raises ConfigError."""
    plan = load_config_file(config_file) if config_file is not None else ServeFile()
    args = plan.config.to_args()
    engine, kv_store, access = (dict(args.get(section, {})) for section in ("engine", "kv_store", "access"))
    http = dict(plan.http_options)
    for name, value in flags.items():
        if name in TLS_FLAGS:
            http[name] = str(Path(value).expanduser().absolute())
        elif name in AccessConfig.model_fields:
            access[name] = str(Path(value).expanduser().absolute()) if name.endswith("_file") else value
        else:
            section = kv_store if name in KV_STORE_KEYS else engine
            (args if name in type(plan.config).model_fields else section)[name] = value
    if "nvme_folder" in flags:
        kv_store["nvme_folder"] = absolute_folder(flags["nvme_folder"])
    for name in ("model", "cache_dir"):  # the replica runs in another folder
        if name in args and (name == "cache_dir" or Path(args[name]).expanduser().exists()):
            args[name] = str(Path(args[name]).expanduser().absolute())
    sections = {"engine": engine, "kv_store": kv_store, "access": access}
    return plan.model_copy(update={"config": parse_config({**args, **sections}), "http_options": http})


def check_plan(plan: ServeFile) -> None:
    """Raises ConfigError for what would fail only once Ray has been started."""
    config = plan.config
    config.kv_store.check_memory()
    config.kv_store.check_folder()
    check_tls(plan.http_options)
    Access(config.access)
    check_port(config.host, config.port)
    if config.access.admin_port:
        check_port(config.access.admin_host, config.access.admin_port)


def _fail(message: str, code: int) -> None:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    raise typer.Exit(code)


class _Terminated(Exception):  # noqa: N818 - a request, not a fault
    """SIGTERM came."""


class ServiceRun:
    """One `tournant serve`: starts the process of local_ray.py, shows how it gets on, and ends it in every case."""

    def __init__(self, plan: ServeFile) -> None:
        self._plan = plan
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("starting")
        self._began = self._step_began = time.monotonic()
        self._step = ""
        self._ready = False
        self._failure: tuple[str, int] | None = None  # reason, exit code
        self._early_log: deque[str] = deque(maxlen=EARLY_LOG_LINES)  # of use only when the start fails
        self._log_reader: threading.Thread | None = None

    def run(self) -> int:
        """Run until the service ends or a signal comes; returns the exit code. Nothing is left behind."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for commands in the background
        signal.signal(signal.SIGTERM, _terminate)
        become_subreaper()
        folder = RunFolder()
        process: subprocess.Popen[str] | None = None
        try:
            with self._status:
                process, reports = self._start(folder)
                self._follow(process, reports)
        except KeyboardInterrupt:
            self._failure = None
            if self._plan.config.kv_store.nvme_bytes:
                self._drain(process, signal.SIGINT)
        except _Terminated:
            self._failure = None
            self._drain(process, signal.SIGTERM)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            left = end_descendants()
            folder.remove()
        if left:
            self._failure = (f"these processes could not be ended: {left}", 1)
        return self._tell_failure()

    def _tell_failure(self) -> int:
        if self._failure is None:
            return 0
        reason, code = self._failure
        if self._log_reader is not None:
            self._log_reader.join(LOG_JOIN_S)
        if code == 1 and not self._ready:
            for line in self._early_log:
                self._print_log(line)
        for line in reason.splitlines():
            typer.echo(f"error: {line}", err=True)
        return code

    def _start(self, folder: RunFolder) -> tuple[subprocess.Popen[str], IO[str]]:
        ours, theirs = os.pipe()
        # -P keeps the current folder off the module path; a session of its own keeps Ctrl-C away from Ray
        command = [sys.executable, "-P", "-m", "tournant.deploy.local_ray", str(theirs), str(folder.path)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            start_new_session=True,
            env=ray_environment(),
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        os.close(theirs)
        if process.stdin is None or process.stdout is None:
            raise OSError("the pipes to the service are missing")
        self._log_reader = threading.Thread(target=self._read_log, args=(process.stdout,), daemon=True, name="log")
        self._log_reader.start()
        process.stdin.write(self._plan.model_dump_json() + "\n")
        process.stdin.flush()
        return process, os.fdopen(ours)

    def _read_log(self, lines: IO[str]) -> None:
        for line in lines:
            if self._ready:
                self._print_log(line)
            else:
                self._early_log.append(line)

    def _print_log(self, line: str) -> None:
        self._console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)

    def _follow(self, process: subprocess.Popen[str], reports: IO[str]) -> None:
        """Show reports until there is a failure or the process ends."""
        for line in reports:
            match json.loads(line):
                case {"step": text}:
                    self._show_step(text)
                case {"ready": facts}:
                    self._show_step("")
                    self._status.stop()
                    self._ready = True
                    self._show_ready(facts)
                case {"failed": reason, "code": code}:
                    self._failure = (reason, code)
                    return
        self._failure = (f"the service ended by itself, with exit code {process.wait()}", 1)

    def _show_step(self, text: str) -> None:
        now = time.monotonic()
        if self._step:
            self._console.print(f"  {self._step}: {now - self._step_began:.1f} s")
        self._step, self._step_began = text, now
        self._status.update(text)

    def _show_ready(self, facts: dict[str, Any]) -> None:
        plan, config = self._plan, self._plan.config
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
        scheme = "https" if plan.http_options.get("ssl_certfile") else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}{plan.route_prefix.rstrip('/')}/v1"
        weights = ", weights as quantised in the file," if facts["native_weights"] else ""
        ranks = f" in {len(facts['ranks'])} ranks" if facts.get("ranks") else ""
        typer.echo(
            f"Ready after {time.monotonic() - self._began:.1f} s: {url} serves {facts['model']} in {facts['dtype']}"
            f"{weights} on {facts['device']}{ranks}, KV pool {facts['pool_tokens']:,} tokens, context "
            f"{facts['max_sequence_tokens']:,} tokens"
        )
        messages = [{"role": "user", "content": QUESTION}]
        question = {"model": facts["model"], "messages": messages, "max_tokens": 100, "temperature": 0}
        _show_store(facts.get("kv_store"), config.kv_store.nvme_folder)
        if (admin := facts.get("admin_address")) is not None:
            typer.echo(f"Operators: http://{admin[0]}:{admin[1]} (tournant weights --url)")
        key = ' -H "Authorization: Bearer $API_KEY"' if config.access.api_keys_file is not None else ""
        typer.echo(
            f"curl {shlex.quote(url + '/chat/completions')}{key} -H 'Content-Type: application/json' -d "
            f"{shlex.quote(json.dumps(question))}"
        )

    def _drain(self, process: subprocess.Popen[str] | None, number: signal.Signals) -> None:
        """Let running requests end (SIGTERM only), and KV reach the NVMe tier. A second signal ends the waiting."""
        if process is None or not self._ready:
            return
        limit, store = DRAIN_S, self._plan.config.kv_store
        if store.nvme_bytes:
            limit += store.drain_s + STOP_MARGIN_S
            self._console.print(f"writing KV blocks to {store.nvme_folder}; Ctrl-C ends at once")
        process.send_signal(number)
        try:
            process.wait(limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt, _Terminated):
            self._console.print("ending what still runs")


def _show_store(facts: dict[str, Any] | None, nvme_folder: str | None) -> None:
    """A line about the node store, if there is one, with what it found at its start."""
    if facts is None:
        return
    if "error" in facts:
        typer.echo(f"KV store: {facts['error']}")
        return
    nvme = ""
    if nvme_folder is not None:
        counts = (f"{name} {facts[key]:,}" for name, key in FOUND_AT_START)
        nvme = f", up to {show_bytes(facts['nvme_cap_bytes'])} in {nvme_folder}: {', '.join(counts)}"
    typer.echo(f"KV store: {show_bytes(facts['host_pages'] * PAGE_BYTES)} of RAM{nvme} (tournant kv status)")


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated


def ray_environment() -> dict[str, str]:
    """The environment of a private Ray: ours without what leads to another cluster, and with a fresh secret."""
    kept = {name: value for name, value in os.environ.items() if name not in RAY_ADDRESSES}
    return {**kept, **RAY_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
