"""Answers: where they end, how long they are, whether they say anything."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from skyrl_train.doctor.findings import Finding, row_of, rows_of
from skyrl_train.doctor.limits import LIMITS
from skyrl_train.doctor.tables import Series, Tables
from skyrl_train.doctor.trajectories import Trajectory, last_number

_MARKS = re.compile(
    r"<\|im_(?:start|end)\|>|\[/?INST\]|<\|(?:user|assistant|system|start_header_id|eot_id)\|>|<start_of_turn>"
    r"|^\s*(?:###\s*)?(?:user|human|assistant|instruction)\s*:",
    re.IGNORECASE | re.MULTILINE,
)
"""What chat templates of several families put between messages."""
_END = re.compile(r"(?:<\|[^|>]{1,40}\|>|</s>)\s*\Z")
"""The token that ends an answer, which samples of supervised runs have at their end."""
_CALL = re.compile(r'<tool_call>|<function=|```tool|\[TOOL_CALLS\]|"(?:name|function)"\s*:\s*".+"arguments"', re.DOTALL)
_WORD = re.compile(r"\d+|\w{3,}")
_FEW = 20
"""Questions below which no mean is trusted."""
_NGRAM = 4
_SHORT = 16
"""Tokens below which a text is too short to repeat itself."""


def answers_cut_off(run: Tables) -> Iterator[Finding]:
    """Many turns end at the limit of tokens, not where the model ends them (the reward then judges half an answer)."""
    length, least = run.series("response_length/mean"), LIMITS["answers_cut_off"]
    cut = run.series("stop/length")
    if run.is_supervised:
        return
    if len(cut) and len(length):  # a step without one has no such metric
        cut = Series(cut.name, length.steps, np.nan_to_num(cut.at(length.steps)))
    if len(cut) >= 2:
        share, since = cut.last(), cut.since(lambda values: values >= least)
    else:
        reasons = [turn.stop_reason for each in run.late for turn in each.turns]
        share, since = reasons.count("length") / max(1, sum(map(bool, reasons))), None
    if not share >= least:
        return
    rows = [each for each in run.trajectories if any(turn.stop_reason == "length" for turn in each.turns)]
    from_the_start = len(cut) < 2 or cut.first(2) >= least
    marked = [each for each in rows if _marks(each)]
    yield Finding(
        what=f"{share:.0%} of the answers of the last steps are cut off at the limit of tokens"
        + ("" if from_the_start else ", and were not at first"),
        evidence=(cut.shown(), length.shown()),
        remedy="Raise generator.sampling.max_generate_length, or pay less for length. Where texts go on by themselves "
        "after the answer, the model does not know its end token: see the chat template and generator.sampling.stop",
        since=since,
        certainty=0.6 if len(marked) > 0.3 * len(rows) or not from_the_start else 0.85,
        rows=rows_of(rows),
    )


def conversation_goes_on_by_itself(run: Tables) -> Iterator[Finding]:
    """Answers hold the marks of a chat template: the model is asked in one that it was not trained with, or
    does not stop."""
    answers = [each for each in [*run.trajectories, *run.evaluations] if each.text]
    marked = [each for each in answers if _marks(each)]
    if len(answers) < 20 or len(marked) < LIMITS["conversation_goes_on_by_itself"] * len(answers):
        return
    found = Counter(mark for each in marked for mark in _marks(each))
    yield Finding(
        what=f"{len(marked) / len(answers):.0%} of the answers hold marks of a chat template, such as "
        f"{found.most_common(1)[0][0]!r}",
        evidence=tuple(f"{mark!r}: {count} times" for mark, count in found.most_common(3)),
        remedy="The prompt is rendered by another template than the model's, or its end token does not end the answer: "
        "compare the tokenizer's chat_template with the model card, and look at the added tokens of a first turn",
        since=min(each.step for each in marked),
        certainty=0.9,
        rows=rows_of(marked),
    )


def never_ends(run: Tables) -> Iterator[Finding]:
    """Supervised: answers of evaluations do not stop, though their examples do, and do not learn to: the end token was never
    trained. What one evaluation shows alone, a model may still learn."""
    by_step: dict[int, list[Trajectory]] = {}
    for each in run.evaluations:
        if each.purpose == "sample" and each.turns and each.step > 0:
            by_step.setdefault(each.step, []).append(each)
    if not run.is_supervised or not by_step or min(map(len, by_step.values())) < 4:
        return
    steps = sorted(by_step)
    unended = {step: [each for each in by_step[step] if each.turns[-1].stop_reason == "length"] for step in steps}
    shares = [len(unended[step]) / len(by_step[step]) for step in steps]
    last, cut = by_step[steps[-1]], unended[steps[-1]]
    if shares[-1] < LIMITS["never_ends"] or shares[-1] < shares[0] - 0.1:
        return
    going_on = [each for each in cut if len(each.text) > 1.5 * len(str(each.extras.get("expected") or each.text))]
    yield Finding(
        what=f"{len(cut)} of {len(last)} answers of the last evaluation do not end, and are longer than the expected ones",
        evidence=(run.series("train/loss").shown(),),
        remedy="The end token has no loss: train on the last token of an answer (the template's end of turn), and see that "
        "no row is cut before it",
        level="problem" if len(steps) > 1 else "note",
        since=steps[0],
        certainty=0.9 if len(going_on) > 0.5 * len(cut) else 0.6,
        rows=rows_of(cut),
    )


def length_changes(run: Tables) -> Iterator[Finding]:
    """Answers shrink to a fraction, or grow to a multiple, while the reward gains nothing by it (DAPO, 3.4; Dr. GRPO). Where
    nearly all have come to end at the limit of tokens, they cannot grow further, and half as much again is enough."""
    length, reward, cut = (run.series(name) for name in ("response_length/mean", "reward/mean", "stop/length"))
    if len(length) < 6 or not length.first(3) > 0:
        return
    ratio, least = length.last() / length.first(3), LIMITS["length_changes"]
    gained = reward.last() - reward.first(3) > 0.1 * (float(run.series("reward/std").values.max(initial=0.0)) or 1.0)
    at_limit = len(cut) > 1 and cut.last() >= 0.8 and np.nansum(cut.at(length.steps[:3])) <= 0.75
    most = min(least, 1.5) if at_limit else least
    if gained or 1 / least < ratio < most:
        return
    grown = ratio > 1
    bound = length.first(3) * (most if grown else 1 / least)
    yield Finding(
        what=f"Answers {'grow' if grown else 'shrink'} from {length.first(3):.0f} to {length.last():.0f} tokens, and the "
        "reward gains nothing by it",
        evidence=(length.shown(), reward.shown(), run.series("stop/length").shown()),
        remedy="Is the loss a mean over sequences, which favours long wrong answers (trainer.algorithm.loss_reduction)? "
        "Is a negative reward escaped by saying little, or a positive one by saying more?",
        since=length.since((lambda values: values >= bound) if grown else (lambda values: values <= bound)),
        certainty=0.8,
        rows=rows_of(run.late),
    )


def repetition(run: Tables) -> Iterator[Finding]:
    """Answers repeat themselves: most of their four-token sequences came before (Holtzman et al., arXiv:1904.09751)."""
    by_step: dict[int, list[tuple[float, Trajectory]]] = {}
    for each in run.trajectories:
        for turn in each.turns:
            words: Sequence[object] = turn.text.split() if turn.token_ids is None else turn.token_ids.tolist()
            if len(words) >= _SHORT:
                by_step.setdefault(each.step, []).append((_repeated(words), each))
    steps = [step for step in sorted(by_step) if len(by_step[step]) >= 4]
    shares = np.array([np.mean([share for share, _ in by_step[step]]) for step in steps])
    least = LIMITS["repetition"]
    if len(steps) < 2 or shares[-2:].mean() < least:
        return
    series = Series("share of repeated 4-grams", np.array(steps), shares)
    shown = [each for share, each in by_step[steps[-1]] if share >= least]
    yield Finding(
        what=f"Answers repeat themselves: {shares[-2:].mean():.0%} of their sequences of four tokens came before",
        evidence=(series.shown(),),
        remedy="Look at the rows: is repetition paid (a reward by length), or has training broken the model? Lower the "
        "learning rate, keep a KL to the reference, and cut repeating answers off with a reward of their own",
        since=series.since(lambda values: values >= least),
        certainty=0.85,
        rows=rows_of(shown),
    )


def unreadable_answers(run: Tables) -> Iterator[Finding]:
    """From the first step on the model is as unsure of its own tokens as if it could not read: another tokenizer, or none of
    its weights."""
    first = run.early
    logprobs = [column for each in first if (column := each.column("logprobs")) is not None and len(column)]
    ids = [column for each in first if (column := each.column("token_ids")) is not None and len(column)]
    broken = [each for each in first if each.text.count("\ufffd") > 0.02 * max(1, len(each.text))]
    if len(logprobs) < 20 or not ids:
        return
    surprise = -float(np.mean(np.concatenate(logprobs)))
    most = float(np.log(max(column.max() for column in ids) + 1))
    if surprise < LIMITS["unreadable_answers"] * most and len(broken) < 0.3 * len(first):
        return
    yield Finding(
        what=f"The model does not know the tokens that it samples: {surprise:.1f} nats a token from the first step on, of "
        f"{most:.1f} for one that guesses",
        evidence=(f"{len(broken)} of {len(first)} first answers hold characters that no text has (U+FFFD)",),
        remedy="The tokenizer belongs to another model, or the weights were not loaded: compare the vocabulary sizes of "
        "model.path and its tokenizer, and look for warnings of missing weights in run.log",
        since=min(each.step for each in first),
        certainty=0.85,
        rows=rows_of(broken or first),
    )


def questions_not_read(run: Tables) -> Iterator[Finding]:
    """From the first step on answers have no more of their own question than of another's: neither words nor the result.

    A model that is asked in a template or by a tokenizer that it was not trained with guesses what it is asked. Means over
    questions are compared with their standard error (a permutation test). Of a template that is foreign by its marks the
    results alone are asked: words of a question are still repeated.
    """
    steps = sorted({each.step for each in run.trajectories})[
        : max(4, len({each.step for each in run.trajectories}) // 2)
    ]
    answers = [each for each in run.trajectories if each.step in steps and each.prompt and each.text]
    prompts = {each.uid: frozenset(_WORD.findall(each.prompt.lower())) for each in answers}
    truths = {each.uid: each.truth for each in answers}
    often = Counter(word for words in prompts.values() for word in words)
    if len(prompts) < _FEW:
        return
    words: dict[str, list[float]] = {uid: [] for uid in prompts}
    results: dict[str, list[float]] = {uid: [] for uid in prompts}
    alike: list[float] = []
    uids = list(prompts)
    for each in answers:
        said = {word for word in _WORD.findall(each.text.lower()) if 0 < often[word] <= len(prompts) / 2}
        result, place = last_number(each.text), uids.index(each.uid)
        others = [uids[(place + shift) % len(uids)] for shift in range(1, 9)]
        alike += [len(said & prompts[uid]) for uid in others]
        words[each.uid].append(len(said & prompts[each.uid]) - float(np.mean(alike[-8:])))
        right = [bool(result) and result == last_number(truths[uid] or "") for uid in (each.uid, *others)]
        results[each.uid].append(right[0] - float(np.mean(right[1:])))
    of_words, of_results = (_errors_above(list(map(np.mean, each.values()))) for each in (words, results))
    most, is_foreign = LIMITS["questions_not_read"], _is_foreign(answers)
    if np.mean(alike) < 0.3 or (of_words > most and not is_foreign) or of_results > most:
        return
    yield Finding(
        what="Answers have nothing to do with their questions: they have no more of their words, and no more often their "
        "results, than of other rows'",
        evidence=(
            f"words of an answer that stand in its question, above those of other questions: {of_words:.1f} standard errors",
            f"results that are the row's truth, above those of other rows: {of_results:.1f} standard errors",
            *(
                ("no prompt holds the token that ends answers, as a template of another model would leave it",)
                * is_foreign
            ),
            run.series("reward/mean").shown(),
        ),
        remedy="The model does not read what it is asked: print a prompt as it is rendered. Is the chat template the one of "
        "this model, and the tokenizer, and is the question within data.max_prompt_length?",
        since=steps[0],
        certainty=0.8,
        rows=rows_of(answers),
    )


def _is_foreign(answers: Sequence[Trajectory]) -> bool:
    """True where prompts are rendered by a template (the last token of all is one), and the token that ends answers, which
    ends what the user says as well, stands in none of them."""
    ended = [turn for each in answers for turn in each.turns if turn.stop_reason == "stop"]
    ids = Counter(int(turn.token_ids[-1]) for turn in ended if turn.token_ids is not None and len(turn.token_ids))
    prompts = [turn.added_token_ids for turn in ended if turn.added_token_ids is not None and len(turn.added_token_ids)]
    is_template = len({int(prompt[-1]) for prompt in prompts}) == 1
    return bool(ids) and is_template and not any(ids.most_common(1)[0][0] in prompt for prompt in prompts)


def _errors_above(values: Sequence[float]) -> float:
    """Return a mean in units of its standard error."""
    return float(np.mean(values) / max(1e-9, np.std(values) / np.sqrt(len(values))))


def calls_not_read(run: Tables) -> Iterator[Finding]:
    """The model calls tools, and nothing reads the calls."""
    calls, malformed = run.series("tools/calls"), run.series("tools/malformed")
    having = [each for each in run.trajectories if each.has_tools or len(calls)]
    trying = [each for each in run.trajectories if _CALL.search(each.text)]
    unread = [each for each in trying if not any(turn.has_tool_calls for turn in each.turns)]
    bad = malformed.last() / max(1e-9, malformed.last() + calls.last()) if len(malformed) and len(calls) else 0.0
    most = LIMITS["calls_not_read"]
    if bad < most and not (len(trying) >= 20 and len(unread) > most * len(trying)):
        return
    yield Finding(
        what=f"Calls of tools are not read: {len(unread)} of {len(trying)} answers with a call had none that "
        "could be parsed",
        evidence=(calls.shown(), malformed.shown(), f"{len(having)} trajectories were told of tools"),
        remedy="environment.tool_format must be the format that the model writes: compare it with the texts below",
        since=min((each.step for each in unread), default=None),
        rows=rows_of(unread),
    )


def entropy_collapses(run: Tables) -> Iterator[Finding]:
    """The policy stops exploring before it has learned the task (Cui et al., arXiv:2505.22617).

    They find that entropy is what reward is paid with, R = -a exp(H) + b. So five times the limit is enough where the
    reward is lower than at first by a fifth of its deviation, which is more than noise: that entropy bought nothing.
    """
    entropy, reward = run.series("policy/entropy"), run.series("reward/mean")
    third = len(reward) // 3
    if len(entropy) < 6 or not third:
        return
    bought = float(np.mean(reward.values[-third:]) - np.mean(reward.values[:third]))
    lost = bought < -0.2 * run.series("reward/std").values.max(initial=0.0)
    bound = LIMITS["entropy_collapses"] * entropy.first(3) * (5 if lost else 1)
    best, least = run.largest_reward, run.least_reward
    if entropy.last() > bound or best <= least or (reward.last() - least) > 0.6 * (best - least):
        return
    distinct = [len({each.text for each in group}) / len(group) for group in run.groups(run.late)]
    yield Finding(
        what=f"The entropy fell from {entropy.first(3):.3g} to {entropy.last():.3g} nats, and the reward stays at "
        f"{reward.last():.3g} of {best:g}",
        evidence=(entropy.shown(), reward.shown())
        + ((f"distinct texts in a group of the last steps: {np.mean(distinct):.0%}",) if distinct else ()),
        remedy="Raise the upper clip (trainer.algorithm.eps_clip_high), add an entropy bonus, sample at temperature 1, or "
        "lower the learning rate",
        since=entropy.since(lambda values: values <= bound),
        certainty=0.8,
        rows=rows_of(run.late),
    )


def _marks(each: Trajectory) -> list[str]:
    """Return the marks of a chat template in an answer, but for the one that ends it."""
    return [match.group().strip() for turn in each.turns for match in _MARKS.finditer(_END.sub("", turn.text))]


def _repeated(words: Sequence[object]) -> float:
    """Return the share of a text's n-grams that stand in it before."""
    grams = [tuple(words[index : index + _NGRAM]) for index in range(len(words) - _NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def tokens_trained(run: Tables) -> Iterator[Finding]:
    """A step trains on more or fewer tokens than its answers have: observations, padding, or a mask that is one off."""
    trained = run.series("batch/trained_tokens")
    by_step: dict[int, list[Trajectory]] = {}
    for each in run.trajectories:
        by_step.setdefault(each.step, []).append(each)
    rows = run.series("total/trajectories")
    differences: list[tuple[int, float, int, int]] = []
    for step, value in zip(trained.steps.tolist(), trained.values.tolist()):
        own = [each for each in by_step.get(step, []) if each.failure is None]
        turns = [turn for each in own for turn in each.turns if turn.token_ids is not None]
        expected = sum(
            len(turn.token_ids) if turn.loss_mask is None else int(np.sum(turn.loss_mask))
            for turn in turns
            if turn.token_ids is not None
        )
        sampled = sum(len(turn.token_ids) for turn in turns if turn.token_ids is not None)
        if expected and abs(value - expected) > 1e-6 * expected and value != sampled:
            differences.append((step, value - expected, expected, len(turns)))
    complete = len(rows) > 0 and all(_is_whole(run, step, own) for step, own in by_step.items())
    if not complete or len(differences) < 2 or len(differences) < LIMITS["tokens_trained"] * len(by_step):
        return
    step, difference, expected, turns_there = differences[0]
    per_turn = difference / max(1, turns_there)
    yield Finding(
        what=f"A step trains on {abs(difference):.0f} tokens {'more' if difference > 0 else 'fewer'} than its answers have"
        + (", one a turn" if abs(abs(per_turn) - 1) < 0.02 else ""),
        evidence=(trained.shown(), f"tokens of the answers of step {step}: {expected}, in {turns_there} turns"),
        remedy="The loss mask is off: prompts, observations or padding are trained on (more), or ends of answers are not "
        "(fewer). `skyrl-doctor audit` recomputes what can be",
        since=step,
        certainty=0.8,
        rows=(row_of(by_step[step][0]),),
    )


def _is_whole(run: Tables, step: int, own: Sequence[Trajectory]) -> bool:
    """True where the rollouts that were read of a step are all that it has."""
    return int(np.sum(run.facts.step == step)) == len(own)
