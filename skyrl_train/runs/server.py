"""The server of Tinker's API, constructed: its models from a run's configuration, its folder, its sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.runs.resolve import limit_threads, resolve
from skyrl_train.telemetry import RunFolder


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What is known of a server beside its models."""

    folder: Path
    """Journal and adapters; one server at a time."""
    tenants: Mapping[str, str]
    """By key."""
    name: str = ""
    """The base model's name for clients; unless given, the last two parts of `model.path`."""
    host: str = "127.0.0.1"
    port: int = 0
    announce: Callable[[int, str], None]
    """Told the port and the name before the first request can be answered."""


def serve(config: Config, settings: ServerSettings) -> None:
    """Answer until the process is told to end. Raises SkyrlTrainError for whatever the user can fix."""
    if config.generator.backend != "hf" or config.placement.backend != "inline":
        rule, remedy = "must be hf, with placement=inline: adapters side by side are served so far", "set generator=hf"
        raise ConfigError([Violation.of("generator.backend", str(config.generator.backend), rule, remedy)])
    config = resolve(config).config
    limit_threads(config)
    import torch
    import uvicorn

    from skyrl_train.model.layers import set_numerics
    from skyrl_train.serve import Models, Service, make_app, schema

    schema()
    if config.platform.name == "cpu":
        torch.set_num_threads(config.platform.num_threads)
    set_numerics(deterministic=config.deterministic)
    name = settings.name or model_name(config.model.path)
    folder = RunFolder(settings.folder)
    folder.create(private=config.output_access == "owner")
    with folder.locked():
        service = Service(Models(config), settings.folder, base_model=name, seed=config.seed)
        listener = uvicorn.Config(
            make_app(service, settings.tenants),
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
        socket = listener.bind_socket()
        socket.listen()
        settings.announce(socket.getsockname()[1], name)
        uvicorn.Server(listener).run(sockets=[socket])


def model_name(path: str) -> str:
    """Return `ORG/NAME` of a path or a hub name; clients look a tokenizer up by it."""
    parts = [part for part in path.replace(":", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(["local", *parts][-2:])
