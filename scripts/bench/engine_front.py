"""CPU time of an engine's front end per token, without a model: what one process does of each step of vLLM's core.

    python -m scripts.bench.engine_front --requests 1024 --steps 60 [--collector python|engine|off]

A step's answers are decoded (`decode`, vLLM's), made into outputs (`process`, vLLM's OutputProcessor), and taken by
`VLLMCore` (`take`, ours). Needs the extra `cpu` or `vllm`. The first half of the steps is not counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from scripts.bench import harness
from skyrl_train.inference.vllm import COLLECTS_AFTER, Running, sampling_arguments
from skyrl_train.types import GenerationRequest, SamplingParams

SAMPLING = SamplingParams(max_generate_length=100_000)
PROMPT = tuple(range(500))


def answers(num_requests: int, generator: np.random.Generator) -> list[bytes]:
    """One step of vLLM's core for all requests, as it comes from its process."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    ids = generator.integers(0, 150_000, (num_requests, 1)).astype(np.int32)
    scores = generator.standard_normal((num_requests, 1)).astype(np.float32)
    logprobs = LogprobsLists(ids, scores, np.ones(num_requests, np.int32), None)
    outputs = [
        EngineCoreOutput(str(row), [int(ids[row, 0])], new_logprobs=logprobs.slice_request(row, 1))
        for row in range(num_requests)
    ]
    return [bytes(part) for part in MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))]


def measure(num_requests: int, num_steps: int) -> dict[str, float]:
    """Return CPU seconds of a step by part."""
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.serial_utils import MsgpackDecoder

    processor, running = OutputProcessor(None, log_stats=False), {}
    for number in range(num_requests):
        name = str(number)
        asked = GenerationRequest(request_id=name, prompt_token_ids=PROMPT, sampling=SAMPLING, seed=number)
        params = sampling_arguments(asked, (), seed=number, is_keyed=False)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(PROMPT),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=name,
        )
        processor.add_request(request, None)
        running[name] = Running(asked, Future())
    generator, decoder = np.random.default_rng(0), MsgpackDecoder(EngineCoreOutputs)
    steps = [answers(num_requests, generator) for _ in range(4)]
    spent = {"decode": 0.0, "process": 0.0, "take": 0.0}
    for step in range(2 * num_steps):
        marks = [time.process_time()]
        outputs = decoder.decode(steps[step % 4]).outputs
        marks.append(time.process_time())
        made = processor.process_outputs(outputs).request_outputs
        marks.append(time.process_time())
        for output in made:
            running[output.request_id].take(output.outputs[0], 1)
        marks.append(time.process_time())
        if step >= num_steps:
            for name, begin, end in zip(spent, marks, marks[1:]):
                spent[name] += (end - begin) / num_steps
    return spent


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--collector", choices=["python", "engine", "off"], default="engine")
    arguments = parser.parse_args(argv)
    if arguments.collector == "engine":
        gc.set_threshold(*COLLECTS_AFTER)
    if arguments.collector == "off":
        gc.disable()
    spent = measure(arguments.requests, arguments.steps)
    total = sum(spent.values())
    parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in spent.items())
    print(
        f"{arguments.requests} requests, collector {arguments.collector}: {1e3 * total:.1f} ms a step ({parts}), "
        f"{arguments.requests / total:,.0f} tokens/s"
    )


if __name__ == "__main__":
    harness.run(main)
