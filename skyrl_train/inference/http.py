"""`HTTPEngine`: a server with vLLM's OpenAI-compatible interface. Token ids in, token ids and log-probabilities out.

Start the server with the trainer's weight-transfer backend, so that it takes new weights (docs/vllm.md):

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --host 127.0.0.1 \\
        --worker-extension-cls skyrl_train.inference.vllm.worker.WorkerExtension \\
        --weight-transfer-config '{"backend": "skyrl_train_buckets"}' ...
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from skyrl_train.errors import DeadlineError, EngineError
from skyrl_train.inference import http_images
from skyrl_train.inference.settings import EngineSettings, stop_token_ids
from skyrl_train.model.files import vocabulary_size
from skyrl_train.rollout import check_answer
from skyrl_train.rollout.http import (
    CONNECT_TIMEOUT_S,
    MAX_BODY_BYTES,
    Reply,
    UnreadableReply,
    ask_until_answered,
    client_arguments,
    send,
)
from skyrl_train.system import in_time
from skyrl_train.types import GenerationOutput, GenerationRequest, StopReason
from skyrl_train.weight_sync import Receiver, UpdatableEngine
from skyrl_train.weights import Bucket

if TYPE_CHECKING:
    from skyrl_train.config.models import HTTPConfig

_MAX_CONNECTIONS = 512
_BODY_BYTES_PER_TOKEN = 1024
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}

T = TypeVar("T")


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
        vocabulary_size: int = 2**31,
        transport: httpx.AsyncBaseTransport | None = None,
        control_transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Asks the server for its model unless `options.model` names one.

        Args:
            options: Where the server is.
            stop_token_ids: Tokens that end a response.
            timeout_s: Deadline of one request, and of one step of a weight update.
            send_seeds: Whether a request has its own seed; otherwise the server's decides (`generator.seeds=engine`).
            vocabulary_size: Token ids of an answer are from 0 to below this.
            transport: For tests; the network unless given.
            control_transport: The same for what is not generation.

        Raises EngineError where the server does not answer or refuses the token, or DeadlineError.
        """
        self._vocabulary_size = vocabulary_size
        self._options, self._stop_token_ids, self._timeout_s = options, stop_token_ids, timeout_s
        self._send_seeds = send_seeds
        token = os.environ.get(options.api_key_env, "")
        common = client_arguments(options.url, token, timeout_s)
        limits = httpx.Limits(max_connections=_MAX_CONNECTIONS)
        self._client = httpx.AsyncClient(**common, limits=limits, transport=transport)
        self._control = httpx.Client(**common, transport=control_transport)
        self._version = -1
        self._confirmed, self._confirming = False, asyncio.Lock()
        self._num_in_flight = 0
        self._initialized = False
        self._model = options.model or self._served_model()

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
        version, where = self._version, f"{self._options.url}, request {request.request_id}"
        most = MAX_BODY_BYTES + _BODY_BYTES_PER_TOKEN * (
            len(request.prompt_token_ids) + request.sampling.max_generate_length
        )

        path, body = "/v1/completions", self._body(request)
        if request.images:
            path, body = http_images.PATH, http_images.image_body(request, body)

        async def attempt() -> Reply:
            try:
                await self._confirm_again()
                reply = await self._send("POST", path, body, most)
            except httpx.TimeoutException:
                raise
            except httpx.HTTPError:
                self._confirmed = False
                raise
            if reply.status == 404 and request.images:
                raise EngineError(f"{where}: the server has no {path}. Prompts with images need --enable-scale-out")
            return reply

        answer = await ask_until_answered(
            attempt, where=where, max_retries=self._options.max_retries, timeout_s=self._timeout_s
        )
        output = _output(http_images.as_completion(answer) if request.images else answer, request, version)
        return check_answer(output, request, vocabulary_size=self._vocabulary_size, versions=(version, version))

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, most: int) -> Reply:
        return await send(self._client, method, path, body, timeout_s=self._timeout_s, most=most)

    def control(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One call beside generation, e.g. of a weight update. Raises EngineError, DeadlineError."""
        where = f"{self._options.url}{path}"

        def ask() -> Reply:
            with self._control.stream(method, path, json=body) as response:
                reply = Reply(where, response, MAX_BODY_BYTES)
                for chunk in response.iter_bytes():
                    reply.add(chunk)
                return reply

        try:
            # A socket's own deadline begins anew with each byte.
            reply = in_time(ask, what=where, timeout_s=self._timeout_s + CONNECT_TIMEOUT_S)
        except (httpx.TimeoutException, DeadlineError):
            raise DeadlineError(where, self._timeout_s) from None
        except httpx.HTTPError as error:
            raise EngineError(f"{where}: {type(error).__name__}: {error}. Is the server up?") from error
        if reply.status in (401, 403):
            raise EngineError(
                f"{self._options.url} refuses the token; put the server's in the environment variable "
                f"{self._options.api_key_env} (generator.http.api_key_env)"
            )
        if reply.status == 404:
            raise EngineError(
                f"{self._options.url} has no {path}. Weight updates need VLLM_SERVER_DEV_MODE=1 in the server's environment"
            )
        if reply.status != 200:
            raise EngineError(f"{where}: status {reply.status}: {reply.beginning}")
        try:
            return reply.json() if reply.body else None
        except UnreadableReply as error:
            raise EngineError(f"{where}: {error}. Is it vLLM's server?") from None

    def _served_model(self) -> str:
        """Return the name that the server gives its model. Raises EngineError, DeadlineError."""
        answer = self.control("GET", "/v1/models")
        try:
            name = answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            name = None
        if not isinstance(name, str) or not name or not name.isprintable():
            raise EngineError(
                f"{self._options.url}/v1/models names no model; it says {repr(answer)[:200]}. Is it vLLM's server? Set "
                "generator.http.url to that, or generator.http.model=NAME"
            )
        return name

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
                reply = await self._send("GET", "/weight_info", None, MAX_BODY_BYTES)
                if reply.status != 200:
                    raise UnreadableReply(f"/weight_info: status {reply.status}: {reply.beginning}")
                self._require_version(reply.json(), self._version)
                self._confirmed = True

    def _require_version(self, info: Any, version: int) -> None:
        found = info.get("weight_version") if isinstance(info, dict) else info
        if type(found) not in (str, int) or str(found) != str(version):
            raise EngineError(
                f"{self._options.url} serves weights {repr(found)[:80]} and not those of version {version}, which it was "
                "given. Was it started again? Resume the run: it sends its weights at the start"
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


def build_http_engine(settings: EngineSettings, tokenizer: Any = None) -> HTTPEngine:  # noqa: ARG001
    """Return the engine behind `generator.http`. Raises EngineError where the server does not answer."""
    return HTTPEngine(
        settings.generator.http,
        stop_token_ids=stop_token_ids(settings.model),
        timeout_s=settings.generator.request_timeout_s,
        send_seeds=settings.generator.seeds == "request",
        vocabulary_size=vocabulary_size(settings.model),
    )


def _output(body: Any, request: GenerationRequest, version: int) -> GenerationOutput:
    """Return what the answer says, whatever its numbers are. Raises EngineError where token ids or log-probabilities are
    missing."""
    try:
        choice = body["choices"][0]
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as error:
        token_ids, why = None, f"{type(error).__name__}: {error}"
    else:
        why = "they are no lists"
    if not isinstance(token_ids, list) or not isinstance(logprobs, list):
        raise EngineError(
            f"request {request.request_id}: the server's answer has no token ids or log-probabilities ({why[:200]}). It "
            "must be vLLM 0.32 or one that understands `return_token_ids`"
        )
    return GenerationOutput(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        stop_reason=_REASONS.get(reason, StopReason.ABORT) if isinstance(reason, str) else StopReason.ABORT,
        weight_version=version,
    )
