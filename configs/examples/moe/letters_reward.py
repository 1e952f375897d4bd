"""The reward of the example."""


def share_of_letter(completions, letter, **columns):
    """Share of characters that are the letter in the prompt; 0 for an empty response."""
    return [text.count(wanted) / max(1, len(text)) for text, wanted in zip(completions, letter, strict=True)]
