"""What a client does with the unmodified SDK, whichever version; it prints what it was told, as JSON. Run in an environment
of its own, which has the SDK and nothing of this project: `python sdk_play.py BASE_MODEL`."""

import json
import sys
import warnings

warnings.simplefilter("ignore")
import tinker  # noqa: E402
from tinker import types  # noqa: E402


def wait(promised):
    return promised.result() if hasattr(promised, "result") else promised


def datum(tokens, **inputs):
    targets = inputs.pop("targets", [*tokens[1:], 7])
    model_input = types.ModelInput.from_ints(tokens)
    return types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": targets, **inputs})


def main() -> None:
    service, told = tinker.ServiceClient(), {}
    client = wait(service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=3))
    info = wait(client.get_info())
    told["info"] = [info.model_data.model_name, info.lora_rank]
    rows = [datum([1, 2, 3, 4], weights=[0.0, 1.0, 1.0, 0.5]), datum([9, 8, 7], weights=[1.0] * 3)]
    told["losses"] = []
    for _ in range(3):
        passed, stepped = (
            client.forward_backward(rows, "cross_entropy"),
            client.optim_step(types.AdamParams(learning_rate=1e-2)),
        )
        told["losses"].append(wait(passed).metrics["loss:sum"])
        wait(stepped)
    found = wait(client.forward(rows, "cross_entropy"))
    told["logprobs"] = logprobs = found.loss_fn_outputs[0]["logprobs"].tolist()
    rl = [datum([1, 2, 3, 4], logprobs=[each - 0.3 for each in logprobs], advantages=[0.0, 1.0, -1.0, 0.5])]
    configs = {"importance_sampling": None, "ppo": {"clip_high_threshold": 1.1}, "cispo": None, "dro": {"beta": 0.1}}
    for loss, config in configs.items():
        told[loss] = wait(client.forward_backward(rl, loss, config)).metrics["loss:sum"]
    sampler = wait(client.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=5, seed=1)
    sampled = wait(sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2))
    told["tokens"] = [list(each.tokens) for each in sampled.sequences]
    told["stops"] = [each.stop_reason for each in sampled.sequences]
    told["prompt"] = sampled.prompt_logprobs
    told["top"] = [None if each is None else len(each) for each in sampled.topk_prompt_logprobs]
    told["computed"] = wait(sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, 4])))
    path = wait(client.save_state("end")).path
    again = wait(service.create_training_client_from_state_with_optimizer(path))
    told["loaded"] = wait(again.forward(rows, "cross_entropy")).loss_fn_outputs[0]["logprobs"].tolist()
    try:
        wait(again.forward_backward(rl, "stable_reinforce"))
    except Exception as error:
        told["refused"] = str(error)
    rest = service.create_rest_client()
    told["listed"] = path in [each.tinker_path for each in wait(rest.list_user_checkpoints()).checkpoints]
    told["runs"] = len(wait(rest.list_training_runs()).training_runs)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
