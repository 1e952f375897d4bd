"""Two reward functions of one's own: plain Python, called with keywords, one number (or None) per completion."""


def text_of(completion):
    """Completions of string prompts are strings; completions of chat prompts are lists with one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def names_capital(completions, capital, **columns):
    """1 where the completion holds the word in the data set's column `capital`; None, not scorable, where that column
    is empty."""
    pairs = zip(completions, capital, strict=True)
    return [float(gold.lower() in text_of(c).lower()) if gold else None for c, gold in pairs]


def brevity(completions, max_words=10):
    """1 up to `max_words` words, a half at twice as many, and so on; `max_words` comes from `args` in the YAML."""
    return [min(1.0, max_words / max(1, len(text_of(c).split()))) for c in completions]
