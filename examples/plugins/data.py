"""How data are read, and what rows without a prompt are."""


def lines(path, *, column="text"):
    """A reader: each line of a text file is a row with one column."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield {column: line.strip()}


def letters(row, *, question="How many letters has {word}?"):
    """A row `{"word": "cat"}` as a question about it."""
    word = row.values["word"]
    return {
        "prompt": [{"role": "user", "content": question.format(word=word)}],
        "reward_spec": {"method": "rule", "ground_truth": str(len(word))},
    }
