"""The server of Tinker's API, constructed: its models, its service, its sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from skyrl_train.config import RunConfig
from skyrl_train.config.derived import LearnerSettings
from skyrl_train.config.models import GeneratorConfig, PlacementConfig
from skyrl_train.endpoints import listening
from skyrl_train.errors import ConfigError, Violation
from skyrl_train.runs.drive import open_folder, uncollected


def require_served(generator: GeneratorConfig, placement: PlacementConfig) -> None:
    """Raises ConfigError for an engine or a placement that the server has not."""
    if generator.backend != "hf" or placement.backend != "inline":
        rule, remedy = "must be hf, with placement=inline: adapters side by side are served so far", "set generator=hf"
        raise ConfigError([Violation.of("generator.backend", str(generator.backend), rule, remedy)])


def serve(
    run: RunConfig,
    learner: LearnerSettings,
    generator: GeneratorConfig,
    *,
    folder: Path,
    tenants: Mapping[str, str],
    name: str,
    host: str,
    port: int,
    max_adapters: int,
    max_bytes: int,
    max_requests: int,
    models_in_memory: int,
    announce: Callable[[int, str], None],
) -> None:
    """Answers clients of Tinker's API until the process is told to end.

    Args:
        folder: Journal and adapters; one server at a time.
        tenants: By key.
        name: The base model's name for clients; empty: the last two parts of `model.path`.
        max_adapters: Of each tenant, as are `max_bytes` and `max_requests`; see `serve.Limits`.
        models_in_memory: Of which more wait on disk until they are asked for.
        announce: Told the port and the name before the first request can be answered.

    Raises SkyrlTrainError for whatever the user can fix: no schema of messages, no weights.
    """
    with uncollected():
        from skyrl_train.runs.task import prepare_process

    prepare_process(run)
    with open_folder(run).locked():
        with uncollected():
            import uvicorn

            from skyrl_train.serve import Limits, Models, RunFolders, Service, make_app, schema

            schema()  # raises where there is none, before models are loaded
            models = Models(learner, generator)
        name = name or model_name(learner.model.path)
        service = Service(
            models,
            folder,
            base_model=name,
            seed=learner.seed,
            limits=Limits(max_adapters=max_adapters, max_bytes=max_bytes, max_requests=max_requests),
            models_in_memory=models_in_memory,
        )
        shown = RunFolders(service.records, folder, lambda tokens: str(models.tokenizer.decode(list(tokens))))
        service.ledger.on_settled = shown.take
        listener = uvicorn.Config(
            make_app(service, tenants),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
        socket = listener.bind_socket()
        announce(listening(socket), name)
        try:
            uvicorn.Server(listener).run(sockets=[socket])
        finally:
            shown.close()


def model_name(path: str) -> str:
    """Return `ORG/NAME` of a path or a hub name; clients look a tokenizer up by it."""
    parts = [part for part in path.replace(":", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(["local", *parts][-2:])
