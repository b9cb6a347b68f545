"""The server of Tinker's API, constructed: its models, its service, its sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.config.derived import learner_settings
from skyrl_train.config.models import GeneratorConfig, PlacementConfig
from skyrl_train.endpoints import listening
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.runs.drive import open_folder, uncollected


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What is known of a server beside its models."""

    folder: Path
    """Journal and adapters; one server at a time."""
    tenants: Mapping[str, str]
    """By key."""
    host: str = "127.0.0.1"
    port: int = 0
    max_adapters: int
    max_bytes: int
    max_requests: int
    """The last three of each tenant, as `serve.Limits` has them."""
    full_for: str = ""
    """The tenant that may train all weights of a model; empty for nobody."""
    models_in_memory: int = 64
    """Of which more wait on disk until they are asked for."""
    announce: Callable[[int, str], None]
    """Told the port and the first base's name before the first request can be answered."""


def require_served(generator: GeneratorConfig, placement: PlacementConfig) -> None:
    """Raises ConfigError for an engine or a placement that the server has not."""
    if generator.backend != "hf" or placement.backend != "inline":
        rule, remedy = "must be hf, with placement=inline: adapters side by side are served so far", "set generator=hf"
        raise ConfigError([Violation.of("generator.backend", str(generator.backend), rule, remedy)])


def serve(settings: ServerSettings, bases: Mapping[str, Config]) -> None:
    """Answers clients of Tinker's API until the process is told to end. `bases` are by their names for clients; the settings
    of the first are the process's. Raises SkyrlTrainError for whatever the user can fix."""
    with uncollected():
        from skyrl_train.runs.task import prepare_process

    run = next(iter(bases.values()))
    prepare_process(run)
    with open_folder(run).locked():
        _listen(settings, bases, seed=run.seed)


def _listen(settings: ServerSettings, bases: Mapping[str, Config], *, seed: int) -> None:
    """Answer until the process is told to end. Raises SkyrlTrainError: no schema of messages, no weights."""
    with uncollected():
        import uvicorn

        from skyrl_train.serve import Limits, Models, RunFolders, Service, make_app, schema

        schema()  # raises where there is none, before models are loaded
        models = {name: Models(learner_settings(each, "policy"), each.generator) for name, each in bases.items()}
    limits = Limits(
        max_adapters=settings.max_adapters,
        max_bytes=settings.max_bytes,
        max_requests=settings.max_requests,
        full_for=settings.full_for,
    )
    service = Service(
        models,
        settings.folder,
        seed=seed,
        limits=limits,
        models_in_memory=settings.models_in_memory,
    )

    def text_of(base: str, tokens: Sequence[int]) -> str:
        return str(service.bases.of(base).tokenizer.decode(list(tokens)))

    shown = RunFolders(service.records, settings.folder, text_of)
    service.ledger.on_settled = shown.take
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
    settings.announce(listening(socket), next(iter(bases)))
    try:
        uvicorn.Server(listener).run(sockets=[socket])
    finally:
        shown.close()
