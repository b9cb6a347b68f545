"""Sampling: log-probabilities, temperature, seeds, stops, lengths, numbers of samples, what is told of the prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from driver import Run, Sampler, Session, sequence
from measure import DATA, PROBES, Noise
from wire import Json

PROMPT = PROBES[0]
GREEDY: Json = {"temperature": 0.0, "stop": []}


@pytest.fixture(scope="module")
def trained(session: Session, lr: float) -> Run:
    """A model a few steps from the base, so that its adapter has a part in every answer."""
    run = session.model()
    for _ in range(3):
        run.forward_backward(DATA)
        run.step(learning_rate=lr)
    return run


@pytest.fixture(scope="module")
def sampler(trained: Run) -> Sampler:
    return trained.snapshot()


def one(answer: Json) -> Any:
    return answer["sequences"][0]


def scored(run: Run, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The model's own log-probabilities of tokens after a prompt."""
    return run.forward([sequence([*prompt, *tokens])]).flat[len(prompt) - 1 :]


def check_logprobs_equal_forward(trained: Run, sampler: Sampler, noise: Noise) -> None:
    """The log-probabilities of sampled tokens are those that forward gives them."""
    answer = sampler.sample(PROMPT, {"max_tokens": 24, "seed": 1, "stop": []}, num_samples=3)
    for each in answer["sequences"]:
        noise.same(each["logprobs"], scored(trained, PROMPT, each["tokens"]), "sampling")


def check_greedy_logprobs_equal_forward(trained: Run, sampler: Sampler, noise: Noise) -> None:
    """The log-probabilities of tokens taken at temperature 0 are forward's, too."""
    found = one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 16}))
    noise.same(found["logprobs"], scored(trained, PROMPT, found["tokens"]), "sampling")


def check_prompt_logprobs(trained: Run, sampler: Sampler, noise: Noise) -> None:
    """The log-probabilities of a prompt are forward's, and none for its first token."""
    found = sampler.sample(PROMPT, {"max_tokens": 1}, prompt_logprobs=True)["prompt_logprobs"]
    assert found[0] is None
    noise.same(found[1:], trained.forward([sequence(PROMPT)]).flat, "sampling")


def check_no_prompt_logprobs_unasked(sampler: Sampler) -> None:
    """Nothing is told of the prompt where nothing was asked."""
    answer = sampler.sample(PROMPT)
    assert not answer.get("prompt_logprobs")
    assert not answer.get("topk_prompt_logprobs")


def check_every_token_has_a_logprob(sampler: Sampler) -> None:
    """Each sampled token has a log-probability, finite and not above 0."""
    for each in sampler.sample(PROMPT, num_samples=4)["sequences"]:
        assert len(each["logprobs"]) == len(each["tokens"]) > 0
        assert max(each["logprobs"]) <= 1e-6
        assert np.isfinite(each["logprobs"]).all()


def check_adapter_is_sampled(session: Session, sampler: Sampler, noise: Noise) -> None:
    """A snapshot samples from the trained adapter, not from the base."""
    asked: Any = ({"max_tokens": 1}, {"prompt_logprobs": True})
    base, tuned = (
        each.sample(PROMPT, asked[0], **asked[1])["prompt_logprobs"][1:] for each in (session.sampler(), sampler)
    )
    noise.differ(base, tuned, "sampling")


def check_new_adapter_is_the_base(session: Session, noise: Noise) -> None:
    """An adapter that was not trained answers as the base model."""
    asked = {"max_tokens": 1}
    base = session.sampler().sample(PROMPT, asked, prompt_logprobs=True)["prompt_logprobs"][1:]
    new = session.model().snapshot().sample(PROMPT, asked, prompt_logprobs=True)["prompt_logprobs"][1:]
    noise.same(base, new, "sampling")


def check_greedy_is_the_same_twice(sampler: Sampler) -> None:
    """Temperature 0 gives the same tokens each time."""
    first, again = (one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 32}))["tokens"] for _ in range(2))
    assert first == again


def check_greedy_ignores_the_seed(sampler: Sampler) -> None:
    """Temperature 0 gives the same tokens whatever the seed."""
    tokens = [one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 16, "seed": seed}))["tokens"] for seed in (1, 2)]
    assert tokens[0] == tokens[1]


@pytest.mark.since("0.29")
def check_greedy_takes_the_best(sampler: Sampler) -> None:
    """Temperature 0 takes the most probable token each time."""
    found = one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 12}, topk_sample_logprobs=3))
    assert found["tokens"] == [row[0][0] for row in found["topk_logprobs"]]


def check_same_seed(sampler: Sampler) -> None:
    """The same seed gives the same tokens."""
    params = {"max_tokens": 24, "seed": 11, "stop": []}
    assert one(sampler.sample(PROMPT, params))["tokens"] == one(sampler.sample(PROMPT, params))["tokens"]


def check_other_seed(sampler: Sampler) -> None:
    """Another seed gives other tokens."""
    tokens = {
        tuple(one(sampler.sample(PROMPT, {"max_tokens": 24, "seed": seed, "stop": []}))["tokens"]) for seed in range(4)
    }
    assert len(tokens) > 1


def check_no_seed(sampler: Sampler) -> None:
    """Requests without a seed give tokens of their own."""
    tokens = {tuple(one(sampler.sample(PROMPT, {"max_tokens": 24, "stop": []}))["tokens"]) for _ in range(4)}
    assert len(tokens) > 1


def check_samples_of_a_request_differ(sampler: Sampler) -> None:
    """The samples of one request differ among themselves, with a seed as without."""
    for seed in (None, 5):
        answer = sampler.sample(PROMPT, {"max_tokens": 24, "seed": seed, "stop": []}, num_samples=4)
        assert len({tuple(each["tokens"]) for each in answer["sequences"]}) > 1


@pytest.mark.parametrize("count", [1, 2, 7])
def check_number_of_samples(sampler: Sampler, count: int) -> None:
    """As many samples are given as were asked for: {count}."""
    assert len(sampler.sample(PROMPT, num_samples=count)["sequences"]) == count


@pytest.mark.parametrize("length", [1, 2, 19])
def check_max_tokens(sampler: Sampler, length: int) -> None:
    """max_tokens={length} ends a sample that does not stop before, for the reason 'length'."""
    found = one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": length}))
    assert len(found["tokens"]) == length
    assert found["stop_reason"] == "length"


def greedy_stop(sampler: Sampler) -> tuple[list[int], int]:
    """The greedy tokens, and the place of one that comes for the first time after the first place."""
    tokens = one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 24}))["tokens"]
    places = [place for place in range(1, len(tokens)) if tokens[place] not in tokens[:place]]
    assert places, "the greedy continuation repeats its first token"
    return tokens, places[-1]


def check_stop_token(sampler: Sampler) -> None:
    """A stop token ends a sample, is its last token, and the reason is 'stop'."""
    tokens, place = greedy_stop(sampler)
    found = one(sampler.sample(PROMPT, {"temperature": 0.0, "stop": [tokens[place]], "max_tokens": 24}))
    assert found["tokens"] == tokens[: place + 1]
    assert found["stop_reason"] == "stop"
    assert len(found["logprobs"]) == place + 1


def check_first_of_several_stops(sampler: Sampler) -> None:
    """Of several stop tokens the first that comes ends a sample."""
    tokens, place = greedy_stop(sampler)
    found = one(sampler.sample(PROMPT, {"temperature": 0.0, "stop": [tokens[place], tokens[0]], "max_tokens": 24}))
    assert found["tokens"] == tokens[:1]


def check_stop_that_does_not_come(sampler: Sampler) -> None:
    """A stop token that does not come ends nothing."""
    tokens, _ = greedy_stop(sampler)
    absent = next(token for token in range(3, 60) if token not in tokens)
    assert one(sampler.sample(PROMPT, {"temperature": 0.0, "stop": [absent], "max_tokens": 24}))["tokens"] == tokens


def check_no_stop_at_all(sampler: Sampler) -> None:
    """An empty list of stops runs to max_tokens, past every end of text."""
    answer = sampler.sample(PROMPT, {"max_tokens": 60, "stop": [], "seed": 2}, num_samples=16)
    assert {(len(each["tokens"]), each["stop_reason"]) for each in answer["sequences"]} == {(60, "length")}


def stopped_by(sampler: Sampler, stop: Any) -> Any:
    return one(sampler.sample(PROMPT, {"temperature": 0.0, "stop": stop, "max_tokens": 24}))


def first_with(decode: Callable[[list[int]], str], tokens: list[int], text: str) -> int:
    """How many tokens there are when their text has the stop string for the first time."""
    return next(length for length in range(1, len(tokens) + 1) if text in decode(tokens[:length]))


@pytest.mark.needs_tokenizer
@pytest.mark.parametrize("listed", [True, False])
def check_stop_string(sampler: Sampler, decode: Callable[[list[int]], str], listed: bool) -> None:
    """A stop string, in a list: {listed}, ends a sample at the token that completes it, and the reason is 'stop'."""
    tokens, place = greedy_stop(sampler)
    text = decode(tokens[: place + 1]).removeprefix(decode(tokens[:place]))
    found = stopped_by(sampler, [text] if listed else text)
    assert found["tokens"] == tokens[: first_with(decode, tokens, text)]
    assert found["stop_reason"] == "stop"
    assert len(found["logprobs"]) == len(found["tokens"])


@pytest.mark.needs_tokenizer
def check_stop_string_across_tokens(sampler: Sampler, decode: Callable[[list[int]], str]) -> None:
    """A stop string that begins in one token and ends in the next ends a sample."""
    tokens, place = greedy_stop(sampler)
    before, whole = decode(tokens[:place]), decode(tokens[: place + 1])
    text = before[-1] + whole.removeprefix(before)[:1]
    found = stopped_by(sampler, [text])
    assert found["tokens"] == tokens[: first_with(decode, tokens, text)]
    assert found["stop_reason"] == "stop"


@pytest.mark.needs_tokenizer
def check_stop_string_that_does_not_come(sampler: Sampler) -> None:
    """A stop string that does not come ends nothing."""
    tokens, _ = greedy_stop(sampler)
    found = stopped_by(sampler, ["a string that no greedy continuation holds"])
    assert found["tokens"] == tokens
    assert found["stop_reason"] == "length"


def check_top_k_of_one(sampler: Sampler) -> None:
    """top_k=1 is temperature 0."""
    found = one(sampler.sample(PROMPT, {"top_k": 1, "max_tokens": 12, "stop": []}))
    assert found["tokens"] == one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 12}))["tokens"]


def check_tiny_top_p(sampler: Sampler) -> None:
    """top_p close to 0 is temperature 0."""
    found = one(sampler.sample(PROMPT, {"top_p": 1e-6, "max_tokens": 12, "stop": []}))
    assert found["tokens"] == one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 12}))["tokens"]


@pytest.mark.since("0.29")
def check_top_k_restricts(sampler: Sampler) -> None:
    """With top_k=3 each token is one of the three most probable."""
    answer = sampler.sample(PROMPT, {"top_k": 3, "max_tokens": 8, "stop": []}, num_samples=8, topk_sample_logprobs=3)
    for each in answer["sequences"]:
        assert all(token in [cell[0] for cell in row] for token, row in zip(each["tokens"], each["topk_logprobs"]))


def first_token_table(sampler: Sampler) -> dict[int, float]:
    """The most probable next tokens after the prompt, with their probabilities."""
    row = one(sampler.sample(PROMPT, {"max_tokens": 1, "temperature": 0.0}, topk_sample_logprobs=5))["topk_logprobs"][0]
    return {token: float(np.exp(value)) for token, value in row}


@pytest.mark.since("0.29")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def check_frequencies(sampler: Sampler, temperature: float) -> None:
    """At temperature {temperature} tokens come as often as their probabilities say, within five standard errors."""
    count, table = 1500, first_token_table(sampler)
    params = {"max_tokens": 1, "temperature": temperature, "seed": 3}
    found = [each["tokens"][0] for each in sampler.sample(PROMPT, params, num_samples=count)["sequences"]]
    best, second = list(table)[:2]
    odds = (table[best] / table[second]) ** (1 / temperature)
    share, seen = odds / (1 + odds), [token for token in found if token in (best, second)]
    error = 5 * np.sqrt(share * (1 - share) / len(seen)) + 1 / len(seen)
    assert abs(seen.count(best) / len(seen) - share) < error
    if temperature == 1.0:
        error = 5 * np.sqrt(table[best] * (1 - table[best]) / count)
        assert abs(found.count(best) / count - table[best]) < error


@pytest.mark.since("0.29")
def check_topk_of_samples(sampler: Sampler) -> None:
    """Each sampled token comes with as many of the most probable ones as were asked for, in order."""
    found = one(sampler.sample(PROMPT, {"max_tokens": 6, "stop": []}, topk_sample_logprobs=4))
    assert [len(row) for row in found["topk_logprobs"]] == [4] * 6
    for row in found["topk_logprobs"]:
        values = [value for _, value in row]
        assert values == sorted(values, reverse=True)
        assert len({token for token, _ in row}) == 4


@pytest.mark.since("0.29")
def check_topk_of_samples_holds_the_token(sampler: Sampler, noise: Noise) -> None:
    """Where a sampled token is among the most probable, its log-probability there is its own."""
    found = one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 6}, topk_sample_logprobs=2))
    noise.same([row[0][1] for row in found["topk_logprobs"]], found["logprobs"], "sampling")


def check_topk_of_the_prompt(trained: Run, sampler: Sampler, noise: Noise) -> None:
    """Each prompt token but the first comes with the most probable ones, with the log-probabilities of forward."""
    rows = sampler.sample(PROMPT, {"max_tokens": 1}, topk_prompt_logprobs=3, prompt_logprobs=True)[
        "topk_prompt_logprobs"
    ]
    assert rows[0] is None
    assert [len(row) for row in rows[1:]] == [3] * (len(PROMPT) - 1)
    for rank in range(3):
        targets = [row[rank][0] for row in rows[1:]]
        asked = {**sequence(PROMPT)}
        asked["loss_fn_inputs"] = {
            **asked["loss_fn_inputs"],
            "target_tokens": {"data": targets, "dtype": "int64", "shape": [len(targets)]},
        }
        noise.same([row[rank][1] for row in rows[1:]], trained.forward([asked]).flat, "sampling")


@pytest.mark.since("0.33")
@pytest.mark.full(needs="prompt_logprobs_last_n")
def check_last_of_the_prompt(sampler: Sampler, noise: Noise) -> None:
    """prompt_logprobs_last_n=4 scores the last four tokens of a prompt, and none before."""
    whole = sampler.sample(PROMPT, {"max_tokens": 1}, prompt_logprobs=True)["prompt_logprobs"]
    last = sampler.sample(PROMPT, {"max_tokens": 1}, prompt_logprobs=True, prompt_logprobs_last_n=4)["prompt_logprobs"]
    assert last[:-4] == [None] * (len(PROMPT) - 4)
    noise.same(last[-4:], whole[-4:], "sampling")


def check_prompt_of_one_token(sampler: Sampler) -> None:
    """A prompt of one token is sampled from, and has no log-probability."""
    answer = sampler.sample([7], {"max_tokens": 3, "stop": []}, prompt_logprobs=True)
    assert len(one(answer)["tokens"]) == 3
    assert answer.get("prompt_logprobs") in ([None], [], None)


def check_prompt_is_not_repeated(sampler: Sampler) -> None:
    """The tokens of a sample are new ones: the prompt is not among them."""
    found = one(sampler.sample(PROMPT, {**GREEDY, "max_tokens": 4}))
    assert len(found["tokens"]) == 4
    assert found["tokens"] != PROMPT[:4]


def check_samples_at_the_same_time(sampler: Sampler) -> None:
    """Greedy samples of eight prompts at the same time are those of each alone."""
    prompts = [PROBES[index % 4][: 4 + index] for index in range(8)]
    promises = [sampler.submit(prompt, params={**GREEDY, "max_tokens": 12}) for prompt in prompts]
    together = [one(sampler.session.server.wait(promise))["tokens"] for promise in promises]
    assert together == [one(sampler.sample(prompt, {**GREEDY, "max_tokens": 12}))["tokens"] for prompt in prompts]


def check_samples_from_threads(sampler: Sampler) -> None:
    """Requests from eight threads are each answered, with samples of their own prompt."""
    found: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        promise = sampler.submit(PROBES[index % 4], seq=500 + index, params={**GREEDY, "max_tokens": 6})
        found[index] = one(sampler.session.server.wait(promise))["tokens"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(index) for index in range(4)] == [found.get(index) for index in range(4, 8)]


def check_sampling_trains_nothing(trained: Run, noise: Noise) -> None:
    """Samples leave the model's weights as they are."""
    before = trained.forward(DATA).flat
    trained.snapshot().sample(PROMPT, num_samples=4)
    noise.same(trained.forward(DATA).flat, before, "forward")


@pytest.mark.since("0.33")
@pytest.mark.full(needs="join_sampling_session")
def check_joined_clients_are_numbered(sampler: Sampler) -> None:
    """Each client that joins a sampling session gets a number of its own, above 0."""
    given = {"sampling_session_id": sampler.id, "type": "join_sampling_session"}
    numbers = [sampler.session.server.call("join_sampling_session", given)["client_counter"] for _ in range(3)]
    assert len(set(numbers)) == 3
    assert min(numbers) > 0
