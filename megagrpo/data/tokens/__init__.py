"""Text to tokens: templates, tokenizer, grammars and sampling parameters of rows."""
