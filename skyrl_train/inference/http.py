"""`HTTPEngine`: a server with vLLM's OpenAI-compatible interface. Token ids in, token ids and log-probabilities out.

Start the server with the trainer's weight-transfer backend, so that it takes new weights (docs/distributed.md):

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --host 127.0.0.1 \\
        --worker-extension-cls skyrl_train.inference.vllm_worker.WorkerExtension \\
        --weight-transfer-config '{"backend": "skyrl_train_buckets"}' ...
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import httpx

from skyrl_train.errors import DeadlineError, EngineError
from skyrl_train.inference.settings import EngineSettings, stop_token_ids
from skyrl_train.types import GenerationOutput, GenerationRequest, StopReason
from skyrl_train.weight_sync.receiver import Receiver, UpdatableEngine
from skyrl_train.weights import Bucket

if TYPE_CHECKING:
    from skyrl_train.config.generation import HTTPConfig

_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S = 0.5
_CONNECT_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 512


class HTTPEngine(UpdatableEngine):
    """Implements `InferenceEngine`. `generate` is used from one event loop.

    Weights come by vLLM's weight-transfer calls, the bytes in files beside them. The server is paused from before the first
    byte until it has them all; where anything fails it stays paused.
    """

    def __init__(
        self,
        options: HTTPConfig,
        *,
        stop_token_ids: tuple[int, ...],
        timeout_s: float,
        send_seeds: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        control_transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Asks the server for its model unless `options.model` names one.

        Args:
            options: Where the server is.
            stop_token_ids: Tokens that end a response.
            timeout_s: Deadline of one request, and of one step of a weight update.
            send_seeds: Whether a request has its own seed; otherwise the server's decides (`generator.seeds=engine`).
            transport: For tests; the network unless given.
            control_transport: The same for what is not generation.

        Raises EngineError where the server does not answer or refuses the token.
        """
        self._options, self._stop_token_ids, self._timeout_s = options, stop_token_ids, timeout_s
        self._send_seeds = send_seeds
        token = os.environ.get(options.api_key_env, "")
        common: dict[str, Any] = {
            "base_url": options.url,
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "timeout": httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
        }
        limits = httpx.Limits(max_connections=_MAX_CONNECTIONS)
        self._client = httpx.AsyncClient(**common, limits=limits, transport=transport)
        self._control = httpx.Client(**common, transport=control_transport)
        self._version = -1
        self._confirmed, self._confirming = False, asyncio.Lock()
        self._num_in_flight = 0
        self._initialized = False
        self._model = options.model or str(self.control("GET", "/v1/models")["data"][0]["id"])

    @property
    def weight_version(self) -> int:
        """Version of the last update that the server confirmed."""
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Tries again, with growing pauses, what the server did not answer or answered with a passing error: the seed
        makes the same tokens. Raises EngineError, DeadlineError."""
        self._num_in_flight += 1
        try:
            return await self._ask(request)
        finally:
            self._num_in_flight -= 1
            # Where nothing is in flight a server may be replaced without an error that would tell.
            self._confirmed = self._confirmed and self._num_in_flight > 0

    async def _ask(self, request: GenerationRequest) -> GenerationOutput:
        version, failure = self._version, ""
        for attempt in range(self._options.max_retries + 1):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                await self._confirm_again()
                response = await self._client.post("/v1/completions", json=self._body(request))
            except httpx.TimeoutException:
                raise DeadlineError(f"{self._options.url}, request {request.request_id}", self._timeout_s) from None
            except httpx.TransportError as error:
                self._confirmed = False
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return _output(response.json(), request, version)
            failure = f"status {response.status_code}: {response.text[:300]}"
            if response.status_code not in _RETRY_STATUS:
                break
        raise EngineError(f"{self._options.url}, request {request.request_id}: {failure}")

    def control(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One call beside generation, e.g. of a weight update. Raises EngineError, DeadlineError."""
        try:
            response = self._control.request(method, path, json=body)
        except httpx.TimeoutException:
            raise DeadlineError(f"{self._options.url}{path}", self._timeout_s) from None
        except httpx.TransportError as error:
            raise EngineError(
                f"{self._options.url}{path}: {type(error).__name__}: {error}. Is the server up?"
            ) from error
        if response.status_code in (401, 403):
            raise EngineError(
                f"{self._options.url} refuses the token; put the server's in the environment variable "
                f"{self._options.api_key_env} (generator.http.api_key_env)"
            )
        if response.status_code == 404:
            raise EngineError(
                f"{self._options.url} has no {path}. Weight updates need VLLM_SERVER_DEV_MODE=1 in the server's environment"
            )
        if response.status_code != 200:
            raise EngineError(f"{self._options.url}{path}: status {response.status_code}: {response.text[:300]}")
        return response.json() if response.content else None

    def receivers(self) -> list[Receiver]:
        """Return one that reads files."""
        return [Receiver(reads_files=True)]

    def begin_update(self) -> None:
        """Pause the server. Raises EngineError, DeadlineError."""
        if not self._initialized:
            self.control("POST", "/init_weight_transfer_engine", {"init_info": {}})
            self._initialized = True
        self.control("POST", "/pause?mode=wait&clear_cache=true")
        self.control("POST", "/start_weight_update")

    def update(self, bucket: Bucket) -> None:
        """Have the server read a bucket from its file. Raises EngineError, DeadlineError."""
        if not bucket.path:
            raise EngineError(f"{self._options.url} takes weights from files. Set generator.weight_transport=files")
        self.control("POST", "/update_weights", {"update_info": bucket.fields()})

    def finish_update(self, version: int, num_tensors: int) -> int:  # noqa: ARG002
        """Have the server go on. Raises EngineError unless it says that it serves these weights, and DeadlineError."""
        self.control("POST", "/finish_weight_update", {"weight_version": str(version)})
        self.control("POST", "/reset_prefix_cache")
        self._require_version(self.control("GET", "/weight_info"), version)
        self._version, self._confirmed = version, True
        self.control("POST", "/resume")
        return version

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._control.close()

    async def _confirm_again(self) -> None:
        """A server that went away and came back has the weights that it was started with: raises EngineError then."""
        async with self._confirming:
            if self._version >= 0 and not self._confirmed:
                self._require_version((await self._client.get("/weight_info")).json(), self._version)
                self._confirmed = True

    def _require_version(self, info: Any, version: int) -> None:
        found = info.get("weight_version") if isinstance(info, dict) else info
        if str(found) != str(version):
            raise EngineError(
                f"{self._options.url} serves weights {found!r} and not those of version {version}, which it was given. "
                "Was it started again? Resume the run: it sends its weights at the start"
            )

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "model": self._model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": sampling.max_generate_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": request.seed if self._send_seeds else None,
            "stop": list(sampling.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": list(self._stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "request_id": request.request_id,
        }


def build_engine(settings: EngineSettings, tokenizer: Any = None) -> HTTPEngine:  # noqa: ARG001
    """Return the engine behind `generator.http`. Raises EngineError where the server does not answer."""
    return HTTPEngine(
        settings.http,
        stop_token_ids=stop_token_ids(settings.model),
        timeout_s=settings.request_timeout_s,
        send_seeds=settings.seeds_by_request,
    )


def _output(body: Any, request: GenerationRequest, version: int) -> GenerationOutput:
    """Raises EngineError where the answer lacks token ids or log-probabilities."""
    try:
        choice = body["choices"][0]
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason = {"stop": StopReason.STOP, "length": StopReason.LENGTH}.get(choice["finish_reason"], StopReason.ABORT)
        return GenerationOutput(
            token_ids=tuple(map(int, token_ids)),
            logprobs=tuple(map(float, logprobs)),
            stop_reason=reason,
            weight_version=version,
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(
            f"request {request.request_id}: the server's answer has no token ids or log-probabilities "
            f"({type(error).__name__}: {error}). It must be vLLM 0.32 or one that understands `return_token_ids`"
        ) from error
