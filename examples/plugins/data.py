"""What rows without a prompt are."""


def letters(row, *, question="How many letters has {word}?"):
    """A row `{"word": "cat"}` as a question about it."""
    word = row.values["word"]
    return {
        "prompt": [{"role": "user", "content": question.format(word=word)}],
        "reward_spec": {"method": "rule", "ground_truth": str(len(word))},
    }
